#include "nccl.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "device.hpp"

namespace sleeping {
namespace {

constexpr size_t kMostMeetings = 1 << 16;

int64_t bytes_of(const Tensors& tensors) {
  int64_t total = 0;
  for (const auto& tensor : tensors) total += static_cast<int64_t>(tensor.nbytes());
  return total;
}

Tensors on_host(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(sleeping::on_host(tensor));
  return result;
}

std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> result;
  for (const auto& list : lists) result.push_back(on_host(list));
  return result;
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors result;
  for (const auto& list : lists) result.insert(result.end(), list.begin(), list.end());
  return result;
}

// AVG, which gloo lacks, is a sum that is divided.
template <class Options>
std::pair<Options, double> sum_of(Options options, int size) {
  if (options.reduceOp != c10d::ReduceOp::AVG) return {options, 1};
  options.reduceOp = c10d::ReduceOp::SUM;
  return {options, 1.0 / size};
}

void scale(const Tensors& tensors, double factor) {
  if (factor == 1) return;
  for (const auto& tensor : tensors) at::Tensor(tensor).mul_(factor);
}

// What DDP's own statistics are made of: it wants a timer, and none of these.
struct NoTimer final : c10d::Timer {
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

}  // namespace
}  // namespace sleeping

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, sleeping::NoTimer)
}

namespace sleeping {

bool NcclWork::wait(std::chrono::milliseconds) {
  synchronize();
  return true;
}

void NcclWork::synchronize() {
  count("Work.synchronize");
  timeline().block(end, current_stream);
  if (blocks_host) timeline().wait_event(end);
}

void NcclWork::enqueued(int64_t stream, const Tensors& results, bool p2p) {
  outputs = results;
  end = timeline().record(stream);
  c10::OptionalStreamGuard guard(stream_of(stream));
  future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                    std::vector<c10::Device>{kDevice});
  future->markCompleted(c10::IValue(outputs));
  if (p2p) guard.reset();
  if (recordFunctionEndCallback_)
    future->addCallback([end = recordFunctionEndCallback_](c10::ivalue::Future&) { end(); }, /*uses_future=*/false);
}

Nccl::Nccl(c10::intrusive_ptr<c10d::Backend> host, int rank, int size, std::string folder, std::string name)
    : Backend(rank, size),
      host_(std::move(host)),
      folder_(std::move(folder)),
      name_(std::move(name)),
      stream_(timeline().new_stream()) {}

Meeting Nccl::next_meeting(int peer, bool sends) {
  const bool pair = peer >= 0;
  const int members = pair ? 2 : size_, self = pair ? (sends ? 0 : 1) : rank_;
  const int from = sends ? rank_ : peer, to = sends ? peer : rank_;
  const std::string key = pair ? std::to_string(from) + "-" + std::to_string(to) : "all";
  auto [at, made] = places_.try_emplace(key);
  Place& place = at->second;
  if (made) {
    const std::string path = folder_ + "/meet-" + name_ + "-" + key;
    const size_t size = kMostMeetings * static_cast<size_t>(members) * sizeof(int64_t);
    const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0, "cannot make ", path);
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    TORCH_CHECK(memory != MAP_FAILED, "cannot map ", path);
    place.arrivals = static_cast<std::atomic<int64_t>*>(memory);
  }
  TORCH_CHECK(place.next < kMostMeetings, "the sleeping device has no room for more communications");
  return {place.arrivals + place.next++ * static_cast<size_t>(members), members, self};
}

Task Nccl::task_of(const Issue& what, Call call) {
  const int64_t duration = settings().latency_ns + static_cast<int64_t>(what.bytes / settings().link_bytes_per_ns);
  Task task{what.title, duration, [call, host = host_] {
              auto work = call(*host);
              if (work) work->wait();
            }};
  task.blocks = true;
  task.meet = [this, peer = what.peer, sends = what.sends] { return std::vector<Meeting>{next_meeting(peer, sends)}; };
  return task;
}

void Nccl::put(int64_t stream, Task task, bool collective) {
  std::vector<OperationPtr> after;
  if (collective && last_) after.push_back(last_);
  const OperationPtr op = timeline().put(stream, std::move(task), std::move(after));
  if (collective && op) last_ = op;
}

WorkPtr Nccl::issue(const Issue& what, Call call) {
  if (coalescing_) {
    together_.emplace_back(what, std::move(call));
    auto work = c10::make_intrusive<NcclWork>(rank_, what.type);
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    return work;
  }
  sequence_++;
  const bool p2p = what.peer >= 0;
  const int64_t stream = p2p ? stream_of_pair(what.peer) : what.async ? stream_ : current_stream;
  if (what.async) timeline().block(timeline().record(current_stream), stream);
  auto work = c10::make_intrusive<NcclWork>(rank_, what.type, what.title, std::optional<Tensors>(what.inputs));
  put(stream, task_of(what, std::move(call)), !p2p);
  work->enqueued(stream, what.outputs, p2p);
  return what.async ? work : nullptr;
}

int64_t Nccl::stream_of_pair(int peer) {
  const auto [at, made] = pair_streams_.try_emplace(peer, 0);
  if (made) at->second = timeline().new_stream();
  return at->second;
}

void Nccl::startCoalescing() {
  coalescing_ = true;
  together_.clear();
}

// One kernel does all of it, for as long as they take together.
WorkPtr Nccl::endCoalescing() {
  coalescing_ = false;
  if (together_.empty()) return nullptr;
  sequence_++;
  const bool async = together_.front().first.async;
  const int64_t stream = async ? stream_ : current_stream;
  if (async) timeline().block(timeline().record(current_stream), stream);
  Tensors outputs, inputs;
  std::vector<Call> calls;
  Task all{"nccl:coalesced", settings().latency_ns};
  std::vector<std::pair<int, bool>> peers;
  for (auto& [what, call] : together_) {
    outputs.insert(outputs.end(), what.outputs.begin(), what.outputs.end());
    all.duration_ns += static_cast<int64_t>(what.bytes / settings().link_bytes_per_ns);
    calls.push_back(call);
    peers.emplace_back(what.peer, what.sends);
  }
  all.blocks = true;
  all.data = [calls, host = host_] {
    std::vector<WorkPtr> works;
    for (const auto& call : calls) works.push_back(call(*host));
    for (const auto& work : works)
      if (work) work->wait();
  };
  all.meet = [this, peers] {
    std::vector<Meeting> meetings;
    for (const auto& [peer, sends] : peers) meetings.push_back(next_meeting(peer, sends));
    return meetings;
  };
  auto work = c10::make_intrusive<NcclWork>(rank_, together_.front().first.type, "nccl:coalesced",
                                            std::optional<Tensors>(inputs));
  together_.clear();
  put(stream, std::move(all), true);
  work->outputs = outputs;
  work->end = timeline().record(stream);
  return async ? work : nullptr;
}

WorkPtr Nccl::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return issue({"nccl:broadcast", c10d::OpType::BROADCAST, bytes_of(tensors), options.asyncOp, tensors, tensors},
               [t = on_host(tensors), options](c10d::Backend& host) mutable { return host.broadcast(t, options); });
}

WorkPtr Nccl::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return issue({"nccl:all_reduce", c10d::OpType::ALLREDUCE, 2 * bytes_of(tensors), options.asyncOp, tensors, tensors},
               [t = on_host(tensors), options, this](c10d::Backend& host) mutable {
                 auto [sum, factor] = sum_of(options, size_);
                 host.allreduce(t, sum)->wait();
                 scale(t, factor);
                 return WorkPtr();
               });
}

WorkPtr Nccl::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return issue({"nccl:allreduce_coalesced", c10d::OpType::COALESCED, 2 * bytes_of(tensors), options.asyncOp, tensors,
                tensors},
               [t = on_host(tensors), options, this](c10d::Backend& host) mutable {
                 auto [sum, factor] = sum_of(options, size_);
                 for (auto& tensor : t) {
                   Tensors one{tensor};
                   host.allreduce(one, sum)->wait();
                 }
                 scale(t, factor);
                 return WorkPtr();
               });
}

WorkPtr Nccl::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return issue({"nccl:reduce", c10d::OpType::REDUCE, bytes_of(tensors), options.asyncOp, tensors, tensors},
               [t = on_host(tensors), options](c10d::Backend& host) mutable { return host.reduce(t, options); });
}

WorkPtr Nccl::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const Tensors all = flat(outputs);
  return issue({"nccl:all_gather", c10d::OpType::ALLGATHER, bytes_of(all), options.asyncOp, all, inputs},
               [o = on_host(outputs), i = on_host(inputs), options](c10d::Backend& host) mutable {
                 return host.allgather(o, i, options);
               });
}

WorkPtr Nccl::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return issue({"nccl:_all_gather_base", c10d::OpType::_ALLGATHER_BASE, bytes_of({output}), options.asyncOp, {output},
                {input}},
               [o = sleeping::on_host(output), i = sleeping::on_host(input), options](c10d::Backend& host) mutable {
                 return host._allgather_base(o, i, options);
               });
}

WorkPtr Nccl::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  return issue({"nccl:all_gather_into_tensor_coalesced", c10d::OpType::COALESCED, bytes_of(outputs), options.asyncOp,
                outputs, inputs},
               [o = on_host(outputs), i = on_host(inputs), options](c10d::Backend& host) mutable {
                 for (size_t k = 0; k < o.size(); k++) host._allgather_base(o[k], i[k], options)->wait();
                 return WorkPtr();
               });
}

WorkPtr Nccl::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return issue({"nccl:_reduce_scatter_base", c10d::OpType::_REDUCE_SCATTER_BASE, bytes_of({input}), options.asyncOp,
                {output}, {input}},
               [o = sleeping::on_host(output), i = sleeping::on_host(input), options, this](c10d::Backend& host) mutable {
                 auto [sum, factor] = sum_of(options, size_);
                 host._reduce_scatter_base(o, i, sum)->wait();
                 scale({o}, factor);
                 return WorkPtr();
               });
}

WorkPtr Nccl::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ReduceScatterOptions& options) {
  return issue({"nccl:reduce_scatter", c10d::OpType::REDUCE_SCATTER, bytes_of(flat(inputs)), options.asyncOp, outputs,
                flat(inputs)},
               [o = on_host(outputs), i = on_host(inputs), options, this](c10d::Backend& host) mutable {
                 auto [sum, factor] = sum_of(options, size_);
                 host.reduce_scatter(o, i, sum)->wait();
                 scale(o, factor);
                 return WorkPtr();
               });
}

WorkPtr Nccl::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& options) {
  return issue({"nccl:reduce_scatter_tensor_coalesced", c10d::OpType::COALESCED, bytes_of(inputs), options.asyncOp,
                outputs, inputs},
               [o = on_host(outputs), i = on_host(inputs), options, this](c10d::Backend& host) mutable {
                 auto [sum, factor] = sum_of(options, size_);
                 for (size_t k = 0; k < o.size(); k++) host._reduce_scatter_base(o[k], i[k], sum)->wait();
                 scale(o, factor);
                 return WorkPtr();
               });
}

WorkPtr Nccl::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  return issue({"nccl:all_to_all", c10d::OpType::ALLTOALL_BASE, bytes_of({output}), options.asyncOp, {output}, {input}},
               [o = sleeping::on_host(output), i = sleeping::on_host(input), output_splits, input_splits,
                options](c10d::Backend& host) mutable {
                 return host.alltoall_base(o, i, output_splits, input_splits, options);
               });
}

WorkPtr Nccl::barrier(const c10d::BarrierOptions& options) {
  auto work = issue({"nccl:all_reduce_barrier", c10d::OpType::ALLREDUCE, 0, options.asyncOp, {}, {}},
                    [](c10d::Backend& host) { return host.barrier(); });
  if (work)
    static_cast<NcclWork&>(*work).blocks_host = true;
  else
    timeline().wait_stream(current_stream);
  return work;
}

WorkPtr Nccl::send(Tensors& tensors, int to, int tag) {
  Issue what{"nccl:send", c10d::OpType::SEND, bytes_of(tensors), true, {}, tensors, to, true};
  return issue(what, [t = on_host(tensors), to, tag](c10d::Backend& host) mutable { return host.send(t, to, tag); });
}

WorkPtr Nccl::recv(Tensors& tensors, int from, int tag) {
  Issue what{"nccl:recv", c10d::OpType::RECV, bytes_of(tensors), true, tensors, {}, from, false};
  return issue(what, [t = on_host(tensors), from, tag](c10d::Backend& host) mutable { return host.recv(t, from, tag); });
}

}  // namespace sleeping
