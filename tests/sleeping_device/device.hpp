// What the parts of the sleeping device share beyond its time line.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace sleeping {

struct Settings {
  int64_t kernel_ns = 3'000;       // how long a kernel lasts that nobody gave a duration
  double copy_bytes_per_ns = 10;   // between host and device
  int64_t latency_ns = 20'000;     // of a communication
  double link_bytes_per_ns = 10;   // of each rank's link
  bool failing = false;            // the device has met an error that does not go away
};
Settings& settings();

struct Memory {
  int64_t allocated = 0, peak = 0, allocations = 0;
};
Memory memory();
void reset_peak();

// As torch's own for CUDA, which only a torch with CUDA has.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

// The tensor's memory as a tensor of the host, which keeps it alive; other tensors as they are.
at::Tensor on_host(const at::Tensor& tensor);

}  // namespace sleeping
