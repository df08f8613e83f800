// Collectives: a kernel in front of every c10d operator tells when it was issued; its work's future, what gloo calls at
// the end of a send or a receive, or gloo's own scopes, when it began and when it ended. Their twin in Python is
// collectors/communication/collective_kernels.py. What gloo tells is in gloo_ends.hpp.

#pragma once

#include <memory>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include "backward.hpp"
#include "call_sites.hpp"
#include "device_issue.hpp"
#include "device_times.hpp"
#include "gloo_ends.hpp"
#include "groups.hpp"
#include "recorder.hpp"
#include "waits.hpp"

namespace dsprof {

struct Payload {
  int64_t bytes = 0;
  uint8_t dtype = 0;
  bool seen = false, cpu = true;
  c10::Device device = c10::kCPU;

  // Returns the bytes of all the tensors in `value`, and notes the first tensor's type and device.
  int64_t add(const c10::IValue& value) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.defined()) return 0;
      if (!seen) {
        seen = true;
        device = tensor.device();
        cpu = device.is_cpu();
        const int type = static_cast<int>(tensor.scalar_type()) + 1;
        dtype = type < kDtypes ? static_cast<uint8_t>(type) : 0;
      }
      return tensor.layout() == at::kStrided ? static_cast<int64_t>(tensor.nbytes()) : 0;
    }
    int64_t total = 0;
    if (value.isList())
      for (const c10::IValue& item : value.toListRef()) total += add(item);
    return total;
  }
};

inline std::atomic<bool> watching_collectives{false};

// The recorder, where c10d is to be recorded.
inline Recorder* recorder_of_collectives() {
  return watching_collectives.load(std::memory_order_relaxed) ? active.load(std::memory_order_acquire) : nullptr;
}

// The kernel in front of one c10d operator (dispatch key BackendSelect, which every call passes).
class CollectiveKernel final : public c10::OperatorKernel {
 public:
  CollectiveKernel(const c10::FunctionSchema& schema, std::string name) : name_(std::move(name)) {
    const auto& arguments = schema.arguments();
    count_ = arguments.size();
    for (size_t i = 0; i < count_; i++) {
      const std::string& argument = arguments[i].name();
      if (argument == "process_group") group_ = static_cast<int>(i);
      if (argument == "async_op") async_ = static_cast<int>(i);
      if (argument == "tag") tag_ = static_cast<int>(i);
      if (argument == "dst" || argument == "src" || argument == "root_rank") peer_ = static_cast<int>(i);
    }
    send_ = name_ == "send";
    barrier_ = name_ == "barrier";
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    static const c10::DispatchKeySet after(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    Payload payload;
    Group* group = nullptr;
    Record* record = nullptr;
    Recorder* recorder = recorder_of_collectives();
    if (!recorder) return op.redispatchBoxed(keys & after, stack);
    Hook hook;
    if (!keys.has_backend(c10::BackendComponent::MetaBit)) record = begin(*recorder, *stack, payload, group);
    if (!record) {
      const bool queued = tag_ < 0 && keys.has_backend(c10::BackendComponent::CPUBit) && is_on_gloo(*stack, *recorder);
      call(op, keys & after, stack, queued && has_future_ != 1 ? std::make_shared<Issued>(nullptr) : nullptr);
      const auto work = remember(*stack, passed_over != kNothing ? this_thread.told : Target());
      if (work && queued) watch_worker(*work);
      return;
    }
    const Target target = this_thread.issued;
    if (!payload.cpu) return call_on_device(op, keys & after, stack, record, target);
    const bool has_scopes = group->gloo == 1 && has_future_ != 1 && tag_ < 0;
    const auto issued = has_scopes ? std::make_shared<Issued>(record) : nullptr;
    call(op, keys & after, stack, issued);
    try {
      set_host_time(record);
      watch(*stack, record, issued, *group, target);
    } catch (...) {
      count_error("the end of a collective");
    }
  }

 private:
  // Calls what is behind the kernel. `issued`: what gloo's scopes are to know it by; null: they are not listened to.
  static void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack,
                   const std::shared_ptr<Issued>& issued) {
    Job job;
    if (!issued) return op.redispatchBoxed(keys, stack);
    c10::DebugInfoGuard guard(debug_slot<c10::DebugInfoKind>(), issued);
    ScopesOfThisThread scopes;
    op.redispatchBoxed(keys, stack);
  }

  Group& group_of(const torch::jit::Stack& stack, Recorder& recorder) const {
    return groups().of(*stack[stack.size() - count_ + group_].toCustomClass<c10d::ProcessGroup>(), recorder);
  }

  bool is_on_gloo(const torch::jit::Stack& stack, Recorder& recorder) const try {
    return group_of(stack, recorder).gloo == 1;
  } catch (...) {
    count_error("the group of a collective");
    return false;
  }

  Record* begin(Recorder& recorder, const torch::jit::Stack& stack, Payload& payload, Group*& group) try {
    if (passed_over != kNothing) return nullptr;
    const c10::IValue* arguments = &stack[stack.size() - count_];
    for (size_t i = 0; i < count_; i++) {
      payload.bytes = std::max(payload.bytes, payload.add(arguments[i]));
    }
    const int64_t bytes = barrier_ ? 0 : payload.bytes;  // a barrier's tensor is a dummy
    const uint8_t dtype = barrier_ ? 0 : payload.dtype;
    if (recorder.generation != generation_) {
      id_ = recorder.intern(name_);
      generation_ = recorder.generation;
    }
    watch_backward(payload.cpu);
    call_sites().note(recorder, id_, bytes, dtype);
    group = &group_of(stack, recorder);
    const int64_t peer = peer_ < 0 ? -1 : arguments[peer_].toInt();
    const int64_t tag = tag_ < 0 ? -1 : arguments[tag_].toInt();
    const uint32_t seq = tag_ < 0 ? group->next++ : groups().next_p2p(*group, peer, tag, send_);
    if (peer > INT16_MAX) throw std::out_of_range("a record has no room for this rank");
    Record* r = recorder.claim();
    if (!r) {  // nobody is to take it for what was there before
      this_thread.issued = Target();
      remember_results(arguments[0], Target());
      return nullptr;
    }
    const int64_t now = now_ns();
    const auto other = static_cast<int16_t>(peer);
    const bool p2p = tag_ >= 0;
    const Target target{id_, group->id, seq, p2p ? other : int16_t{-1}, p2p ? static_cast<int32_t>(tag) : -1, p2p};
    fill_comm(r, kComm, target, now, 0, now, bytes, dtype, context, other);
    if (async_ >= 0 && arguments[async_].toBool()) r->head.flags = kAsync;
    publish(r, kBegun);
    note_issued(recorder, *r, now);
    remember_results(arguments[0], this_thread.issued);
    return r;
  } catch (...) {
    count_error("a collective");
    return nullptr;
  }

  static void set_host_time(Record* r) {
    if (r->head.family != kCollectiveFamily) return;
    r->collective.host_ns = static_cast<uint32_t>(std::min<int64_t>(now_ns() - r->collective.issue_ns, UINT32_MAX));
  }

  // Of a work that nothing else has to be done about, its target; returns the work, null where there is none.
  static c10::intrusive_ptr<c10d::Work> remember(const torch::jit::Stack& stack, const Target& target) try {
    if (stack.empty() || !stack.back().isObject()) return {};
    auto work = stack.back().toCustomClass<c10d::Work>();
    if (work) remember_work(*work, target);
    return work;
  } catch (...) {
    count_error("the work of a collective");
    return {};
  }

  // Issues it and has the record completed when its stream has done it.
  void call_on_device(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack, Record* record,
                      const Target& target) {
    const bool together = coalesced.gathering;
    Moment* begin = together ? nullptr : device_times().now();
    const bool graphed = !begin && device_times().into_graph();  // a moment is only of a stream that is not captured
    DeviceIssue issue(begin);
    call(op, keys, stack, nullptr);
    try {
      set_host_time(record);
      remember(*stack, target);
      const bool collective = record->head.family == kCollectiveFamily;
      const bool runs_here = collective && async_ >= 0 && !(record->head.flags & kAsync);
      const uint16_t group = collective ? record->collective.group : uint16_t{0};
      if (graphed) {
        device_times().into_graphs++;
        publish(record, kDone);
      } else if (together) {
        coalesced.add(record, group, runs_here);
      } else if (runs_here) {
        issue.issued_here({record}, group);
      } else {
        issue.issued({record}, group);
      }
    } catch (...) {
      count_error("the end of a collective on a device");
      publish(record, kDone);
    }
  }

  // Arranges for the record of a CPU collective to be completed when its work is. `issued` is what gloo's scopes know it
  // by, if they are listened to.
  void watch(const torch::jit::Stack& stack, Record* record, const std::shared_ptr<Issued>& issued, const Group& group,
             const Target& target) {
    if (stack.empty() || !stack.back().isObject()) {  // it returns no work: it was done in the call
      if (issued) issued->ends_with_scope = false;
      return complete(record, now_ns());
    }
    const auto work = remember(stack, target);
    const bool on_gloo = group.gloo == 1;
    if (work && on_gloo && tag_ >= 0) return EndOfP2p::watch(*work, record);
    const auto future = work ? future_of(*work, on_gloo) : nullptr;
    if (future) {
      if (issued) {  // what its scopes told until now may be of others, which ProcessGroupWrapper calls before it
        issued->ends_with_scope = false;
        record->head.end_ns = 0;
        publish(record, kBegun);
      }
      // Called by gloo's worker before the work is finished. No Python here: waiting for the GIL would delay the job.
      future->addCallback(
          [record, on_gloo](c10::ivalue::Future& done) {
            const int64_t now = now_ns();
            if (on_gloo) ended_on_worker(record, now);
            if (!done.hasError()) complete(record, now);
          },
          /*uses_future=*/false);
    } else if (!issued) {
      publish(record, kDone);  // nothing will tell its end
    }
  }

  // Of a work of gloo that is not recorded: what its worker does next begins after it.
  void watch_worker(c10d::Work& work) try {
    if (const auto future = future_of(work, /*on_gloo=*/true))
      future->addCallback([](c10::ivalue::Future&) { last_work_ended_ns = now_ns(); }, /*uses_future=*/false);
  } catch (...) {
    count_error("the work of a collective");
  }

  // Null where this kind of work has none. To ask gloo's in vain costs more than all that is done here: it is asked once.
  c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work, bool on_gloo) {
    if (on_gloo && has_future_ == 0) return nullptr;
    try {
      auto future = work.getFuture();
      if (on_gloo && future) has_future_ = 1;
      return future;
    } catch (const c10::Error&) {
      if (on_gloo) has_future_ = 0;
      return nullptr;
    }
  }

  std::string name_;
  size_t count_ = 0;
  int group_ = -1, async_ = -1, tag_ = -1, peer_ = -1;
  bool send_ = false, barrier_ = false;
  std::atomic<int8_t> has_future_{-1};  // whether this operator's works of gloo have one; -1: nobody knows yet
  std::atomic<uint64_t> generation_{0};
  std::atomic<uint16_t> id_{0};
};

// In front of an operator of `_c10d_functional`, which issues a collective, or several.
class FunctionalKernel final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    static const c10::DispatchKeySet after(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    if (!recorder_of_collectives()) return op.redispatchBoxed(keys & after, stack);
    struct Inside {
      Inside() { this_thread.functional++; }
      ~Inside() { this_thread.functional--; }
    } inside;
    op.redispatchBoxed(keys & after, stack);
  }
};

// Functional collectives are waited for by an operator.
class WaitKernel final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    static const c10::DispatchKeySet after(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    Record* r = keys.has_backend(c10::BackendComponent::MetaBit) ? nullptr : begin(*stack);
    struct Ending {
      Record* r;
      ~Ending() {
        if (!r) return;
        device_times().end(r);
        complete(r, now_ns());
      }
    } ending{r};
    if (r) device_times().begin(r);
    op.redispatchBoxed(keys & after, stack);
  }

 private:
  static Record* begin(const torch::jit::Stack& stack) try {
    Recorder* recorder = recorder_of_collectives();
    Record* r = recorder && passed_over != kCallsAndWaits ? recorder->claim() : nullptr;
    if (!r) return nullptr;
    const int64_t now = now_ns();
    const Target target = target_of_tensor(stack.back().toTensor());
    return begin_wait(r, now, target, target.name ? 0 : recorder->intern("wait_tensor"));
  } catch (...) {
    count_error("wait_tensor");
    return nullptr;
  }
};

template <class Kernel, class... Args>
torch::CppFunction kernel(Args&&... args) {
  return torch::CppFunction::makeFromBoxedKernel(
      c10::BoxedKernel::makeFromFunctor(std::make_unique<Kernel>(std::forward<Args>(args)...)));
}

// The kernels stay for good, as those of syncs.hpp: taken out, another thread that is in front of one would find nothing
// behind it. So does their library: at process exit the dispatcher may be gone before it. `names`: operator (without
// "c10d::") -> name in the trace.
inline void install_collective_kernels(const std::vector<std::pair<std::string, std::string>>& names) {
  auto library = [](const char* space) {
    return new torch::Library(torch::Library::IMPL, space, c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  };
  torch::Library* c10d = library("c10d");
  torch::Library* functional = library("_c10d_functional");
  for (const auto& [op, name] : names) {
    auto handle = c10::Dispatcher::singleton().findSchema({"c10d::" + op, ""});
    if (handle) c10d->impl(op.c_str(), kernel<CollectiveKernel>(handle->schema(), name));
  }
  functional->impl("wait_tensor", kernel<WaitKernel>());
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string text = c10::toString(op);  // with the overload's name, if it has one
    if (op.name.rfind("_c10d_functional::", 0) == 0 && op.name != "_c10d_functional::wait_tensor")
      functional->impl(text.c_str() + strlen("_c10d_functional::"), kernel<FunctionalKernel>());
  }
}

inline void install_collectives(const std::vector<std::pair<std::string, std::string>>& names) {
  groups().clear();
  works().clear();
  storages().clear();
  this_thread = Thread();
  static const bool installed = (install_collective_kernels(names), true);
  (void)installed;
  watching_collectives = true;
}

inline void uninstall_collectives() { watching_collectives = false; }

}  // namespace dsprof
