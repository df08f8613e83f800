// Where the host stands still for a device: the operators that give a device's values to the host, and copies between the
// two. What `.item()`, `.tolist()`, `.cpu()`, `if tensor:`, `x[mask]` and printing come down to are these. Calls that wait
// for a device without an operator (torch.cuda.synchronize) are wrapped in Python: collectors/devices/host_sync.py.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_local_scalar_dense_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/nonzero_ops.h>
#include <torch/library.h>

#include "recorder.hpp"
#include "sites.hpp"

namespace dsprof {

// In the order of schema.SYNC_CALLS.
enum SyncCall : uint8_t { kItemCall, kNonzeroCall, kToHostCall, kToDeviceCall };

// What need not wait and takes longer than this waited all the same: memory that is not pinned.
constexpr int64_t kStoodNs = 100'000;

inline std::atomic<bool> watching_syncs{false};
inline thread_local bool inside_sync = false;  // a copy may be made of copies

constexpr uint64_t backend_bit(c10::BackendComponent backend) {
  return uint64_t{1} << (static_cast<uint8_t>(backend) - 1);
}
constexpr uint64_t kHostBit = backend_bit(c10::BackendComponent::CPUBit);
constexpr uint64_t kDeviceBits =
    c10::full_backend_mask & ~kHostBit & ~backend_bit(c10::BackendComponent::MetaBit);

inline c10::DispatchKeySet after_us(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
}

inline bool to_be_recorded() {
  return watching_syncs.load(std::memory_order_relaxed) && !inside_sync && active.load(std::memory_order_relaxed);
}

inline void fill_sync(Recorder& recorder, Record* r, SyncCall call, int64_t start, int64_t end, int64_t bytes) {
  struct Ids {
    uint64_t generation = 0;
    uint16_t name = 0, calls[std::size(kSyncCalls)] = {};
  };
  static thread_local Ids ids;
  if (ids.generation != recorder.generation) {
    ids.name = recorder.intern(kHostSync);
    for (size_t i = 0; i < std::size(kSyncCalls); i++) ids.calls[i] = recorder.intern(kSyncCalls[i]);
    ids.generation = recorder.generation;
  }
  fill(r, kMark, ids.name, start, end, kNoValue, bytes, 0, {0, {-1, -1, 0, ids.calls[call]}});
}

// An operator that waits, from its beginning on: what is under way at a hang is on disk.
class Sync {
 public:
  Sync(SyncCall call, int64_t bytes) {
    try {
      Recorder* recorder = active.load(std::memory_order_acquire);
      Record* r = recorder ? recorder->claim() : nullptr;
      if (!r) return;
      fill_sync(*recorder, r, call, now_ns(), 0, bytes);
      publish(r, kBegun);
      record_ = r;
      inside_sync = true;
    } catch (...) {
      count_error("a wait for the device");
    }
  }

  ~Sync() {
    if (!record_) return;
    inside_sync = false;
    const int64_t now = now_ns();
    // Last, as another thread may have the GIL: that is not what the device took.
    if (Recorder* recorder = active.load(std::memory_order_acquire)) record_->span.site = sites().here(*recorder);
    complete(record_, now);
  }

  Sync(const Sync&) = delete;
  Sync& operator=(const Sync&) = delete;

 private:
  Record* record_ = nullptr;
};

inline at::Scalar item_kernel(c10::DispatchKeySet keys, const at::Tensor& self) {
  if (!(keys.raw_repr() & kDeviceBits) || !to_be_recorded())
    return at::_ops::_local_scalar_dense::redispatch(after_us(keys), self);
  const Sync sync(kItemCall, -1);
  return at::_ops::_local_scalar_dense::redispatch(after_us(keys), self);
}

inline at::Tensor nonzero_kernel(c10::DispatchKeySet keys, const at::Tensor& self) {
  if (!(keys.raw_repr() & kDeviceBits) || !to_be_recorded())
    return at::_ops::nonzero::redispatch(after_us(keys), self);
  const Sync sync(kNonzeroCall, -1);
  return at::_ops::nonzero::redispatch(after_us(keys), self);
}

// A copy that need not wait, and did.
inline void note_slow_copy(SyncCall call, int64_t start, int64_t bytes) noexcept try {
  const int64_t now = now_ns();
  Recorder* recorder = active.load(std::memory_order_acquire);
  if (!recorder || now - start < kStoodNs) return;
  Record* r = recorder->claim();
  if (!r) return;
  fill_sync(*recorder, r, call, start, now, bytes);
  r->span.site = sites().here(*recorder);
  publish(r, kDone);
} catch (...) {
  count_error("a wait for the device");
}

inline at::Tensor& copy_kernel(c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const uint64_t backends = keys.raw_repr();
  if (!(backends & kDeviceBits) || !(backends & kHostBit) || !to_be_recorded())
    return at::_ops::copy_::redispatch(after_us(keys), self, source, non_blocking);
  const SyncCall call = self.is_cpu() ? kToHostCall : kToDeviceCall;
  const int64_t bytes = self.layout() == at::kStrided ? static_cast<int64_t>(self.nbytes()) : -1;
  if (!non_blocking) {
    const Sync sync(call, bytes);
    return at::_ops::copy_::redispatch(after_us(keys), self, source, non_blocking);
  }
  const int64_t start = now_ns();
  at::Tensor& result = at::_ops::copy_::redispatch(after_us(keys), self, source, non_blocking);
  note_slow_copy(call, start, bytes);
  return result;
}

// The kernels stay for good: taken out, another thread that is in front of one would find nothing behind it. Without a
// capture they pass on, which takes nanoseconds.
inline void install_syncs() {
  static const auto* library = [] {
    auto* aten = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
    aten->impl("_local_scalar_dense", TORCH_FN(item_kernel));
    aten->impl("nonzero", TORCH_FN(nonzero_kernel));
    aten->impl("copy_", TORCH_FN(copy_kernel));
    return aten;
  }();
  (void)library;
  watching_syncs = true;
}

inline void uninstall_syncs() { watching_syncs = false; }

}  // namespace dsprof
