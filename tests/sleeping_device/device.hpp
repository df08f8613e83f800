// What the parts of the sleeping device share beyond its time line.

#pragma once

#include <cstdint>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include "timeline.hpp"

namespace sleeping {

inline const c10::Device kDevice(c10::DeviceType::CUDA, 0);

inline c10::Stream stream_of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

struct Settings {
  int64_t kernel_ns = 3'000;       // how long a kernel lasts that nobody gave a duration
  double copy_bytes_per_ns = 10;   // between host and device
  int64_t latency_ns = 20'000;     // of a communication
  double link_bytes_per_ns = 10;   // of each rank's link
  bool failing = false;            // the device has met an error that does not go away
};
Settings& settings();

// --- memory

struct Memory {
  int64_t allocated = 0, peak = 0, allocations = 0;
};
Memory memory();
void reset_peak();

c10::Allocator* allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

// As torch's own for CUDA, which only a torch with CUDA has.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

// The tensor's memory as a tensor of the host, which keeps it alive; other tensors as they are.
at::Tensor on_host(const at::Tensor& tensor);

// The same memory with other sizes.
at::Tensor view_of(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset);

// What moves an operation's data, to be called from any thread.
template <class Body>
Closure below_autograd(Body body) {
  return [body = std::move(body)] {
    at::AutoDispatchBelowADInplaceOrView guard;
    body();
  };
}

}  // namespace sleeping
