// Copies: between host and device at the speed of their link, of which some the host waits for; `.item()` is one.

#include <ATen/ops/clone.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/item.h>
#include <torch/library.h>

#include "device.hpp"
#include "timeline.hpp"

namespace sleeping {
namespace {

int64_t copying_ns(int64_t bytes) { return 5'000 + static_cast<int64_t>(bytes / settings().copy_bytes_per_ns); }

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  const bool between = self.is_cuda() && source.is_cuda();
  at::Tensor from = source;
  const at::Tensor& host = self.is_cpu() ? self : source;
  const bool staged = !between && !is_pinned(host.storage().data());  // from or to memory that the device cannot reach by itself
  if (staged && source.is_cpu()) from = source.clone();
  auto data = below_autograd([to = on_host(self), from = on_host(from)] { at::Tensor(to).copy_(from); });
  const int64_t duration = between ? settings().kernel_ns : copying_ns(static_cast<int64_t>(self.nbytes()));
  const auto op = timeline().put(current_stream, {between ? "copy_" : self.is_cpu() ? "copy to host" : "copy to device",
                                                  duration, std::move(data)});
  if (!between && (!non_blocking || (staged && self.is_cpu()))) timeline().wait(op);
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  timeline().wait(timeline().put(current_stream, {"copy to host", copying_ns(static_cast<int64_t>(self.nbytes()))}));
  return on_host(self).item();
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", &copy_);
  library.impl("_local_scalar_dense", &local_scalar_dense);
}

}  // namespace sleeping
