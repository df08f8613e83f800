// A backend of c10d that communicates as torch's ProcessGroupNCCL does:
// - a collective, on a stream of its own beside the computation, while the host goes on; with `async_op=False` on the
//   stream that is current, and then without a work;
// - a send or a receive by itself, always on a stream of the two ranks;
// - what is coalesced, by one work when all has been given.
// A work's `wait` has the current stream wait and not the host, but a barrier's, which has both. A future is complete as
// soon as the communication is on its stream. The end of a work's profiling scope is called then: of a collective with
// that stream current, of a send or a receive with the job's; what is coalesced has neither future nor end. The data go
// through a backend of the host (gloo).

#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "timeline.hpp"

namespace sleeping {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class NcclWork final : public c10d::Work {
 public:
  using c10d::Work::Work;

  bool wait(std::chrono::milliseconds) override;
  void synchronize() override;
  bool isCompleted() override { return timeline().over(end); }
  bool isSuccess() const override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  std::vector<at::Tensor> result() override { return outputs; }

  // The work is on `stream`: its future is complete, which calls the end of its scope.
  void enqueued(int64_t stream, const Tensors& results, bool p2p);

  Event end;
  Tensors outputs;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool blocks_host = false;  // a barrier's
};

class Nccl final : public c10d::Backend {
 public:
  // `host`: what moves the data. `folder`: where the ranks meet; `name`: of the group, the same on all of them.
  Nccl(c10::intrusive_ptr<c10d::Backend> host, int rank, int size, std::string folder, std::string name);

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;

 private:
  using Call = std::function<WorkPtr(c10d::Backend&)>;
  struct Issue {
    const char* title;
    c10d::OpType type;
    int64_t bytes;
    bool async;
    Tensors outputs, inputs;
    int peer = -1;         // of a send or a receive, and its direction
    bool sends = false;
  };

  WorkPtr issue(const Issue& what, Call call);
  int64_t stream_of_pair(int peer);
  // Where the ranks meet for their next communication: all of the group, or the two of a send and its receive.
  Meeting next_meeting(int peer, bool sends);
  // Collectives of one communicator run one after the other, on whichever streams they are.
  void put(int64_t stream, Task task, bool collective);
  Task task_of(const Issue& what, Call call);

  c10::intrusive_ptr<c10d::Backend> host_;
  std::string folder_, name_;
  int64_t stream_;
  std::map<int, int64_t> pair_streams_;
  uint64_t sequence_ = 0;
  OperationPtr last_;
  struct Place {
    std::atomic<int64_t>* arrivals;
    size_t next = 0;
  };
  std::map<std::string, Place> places_;
  bool coalescing_ = false;
  std::vector<std::pair<Issue, Call>> together_;
};

}  // namespace sleeping
