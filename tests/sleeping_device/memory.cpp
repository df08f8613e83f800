// The device's memory, which lies in the host's, and the host's that is pinned. It is freed when the host lets go of it, as
// a caching allocator does it, though data may still be moved there.

#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_set>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>

#include "device.hpp"

namespace sleeping {
namespace {

struct Block {
  explicit Block(size_t size) : memory(new char[size ? size : 1]) {}
  std::unique_ptr<char[]> memory;
};

struct Holder {
  std::shared_ptr<Block> block;
  size_t size;
};

Memory memory_;
std::mutex memory_mutex;

void release(void* context) {
  auto* holder = static_cast<Holder*>(context);
  if (!holder) return;
  std::lock_guard<std::mutex> lock(memory_mutex);
  memory_.allocated -= static_cast<int64_t>(holder->size);
  delete holder;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (!size) return {nullptr, nullptr, &release, kDevice};
    size = (size + 511) / 512 * 512;
    auto* holder = new Holder{std::make_shared<Block>(size), size};
    std::lock_guard<std::mutex> lock(memory_mutex);
    memory_.allocated += static_cast<int64_t>(size);
    memory_.peak = std::max(memory_.peak, memory_.allocated);
    memory_.allocations++;
    return {holder->block->memory.get(), holder, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};

std::unordered_set<const void*>& pinned() {
  static auto* instance = new std::unordered_set<const void*>;
  return *instance;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* memory = new char[size ? size : 1];
    std::lock_guard<std::mutex> lock(memory_mutex);
    pinned().insert(memory);
    return {memory, memory, &unpin, c10::Device(c10::kCPU)};
  }
  static void unpin(void* memory) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    pinned().erase(memory);
    delete[] static_cast<char*>(memory);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};

DeviceAllocator device_memory;
PinnedAllocator pinned_memory;

struct RegisteredAllocator {
  RegisteredAllocator() { c10::SetAllocator(c10::DeviceType::CUDA, &device_memory); }
} registered_allocator;

}  // namespace

c10::Allocator* allocator() { return &device_memory; }
c10::Allocator* pinned_allocator() { return &pinned_memory; }

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  return pinned().count(data) > 0;
}

Memory memory() {
  std::lock_guard<std::mutex> lock(memory_mutex);
  return memory_;
}

void reset_peak() {
  std::lock_guard<std::mutex> lock(memory_mutex);
  memory_.peak = memory_.allocated;
}

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  auto data = device_memory.allocate(bytes);
  const size_t kept = std::min(storage.nbytes(), bytes);
  if (kept) memcpy(data.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const auto* holder = static_cast<Holder*>(tensor.storage().data_ptr().get_context());
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (!holder) return at::empty_strided(tensor.sizes(), tensor.strides(), options);  // no bytes
  return at::from_blob(tensor.storage().unsafeGetStorageImpl()->mutable_data(), tensor.sizes(), tensor.strides(),
                       tensor.storage_offset(), [block = holder->block](void*) {}, options, std::nullopt);
}

}  // namespace sleeping
