// The device behind torch's calls: its guard, its memory, its kernels. Tensors lie in host memory; kernels are those of
// the CPU, and last as long as `sleeping::settings` says.

#include <cstring>
#include <numeric>
#include <unordered_map>
#include <unordered_set>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "device.hpp"
#include "timeline.hpp"

namespace sleeping {

Timeline& timeline() {
  static auto* instance = new Timeline;
  return *instance;
}

Settings& settings() {
  static Settings instance;
  return instance;
}

namespace {

std::mutex counting;
std::map<std::string, int64_t>& counters() {
  static auto* instance = new std::map<std::string, int64_t>;
  return *instance;
}

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

c10::Stream stream_of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

}  // namespace

void count(const char* what) {
  std::lock_guard<std::mutex> lock(counting);
  counters()[what]++;
}

std::map<std::string, int64_t> counts() {
  std::lock_guard<std::mutex> lock(counting);
  return counters();
}

// --- memory: freed when the host lets go of it, as a caching allocator does it, though data may still be moved there

struct Block {
  explicit Block(size_t size) : memory(new char[size ? size : 1]) {}
  std::unique_ptr<char[]> memory;
};

namespace {

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

DeviceAllocator allocator;
PinnedAllocator pinned_allocator;

bool is_pinned(const at::Tensor& tensor) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  return pinned().count(tensor.storage().data()) > 0;
}

}  // namespace

Memory memory() {
  std::lock_guard<std::mutex> lock(memory_mutex);
  return memory_;
}

void reset_peak() {
  std::lock_guard<std::mutex> lock(memory_mutex);
  memory_.peak = memory_.allocated;
}

// --- streams and events

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream_of(timeline().new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(timeline().new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current_stream, stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  bool isStreamCapturing(const c10::Stream& stream) const override { return timeline().is_capturing(stream.id()); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    count("record");
    if (settings().failing) throw std::runtime_error("CUDA error: an illegal memory access was encountered");
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = timeline().record(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    count("block");
    if (event) timeline().block(*static_cast<Event*>(event), stream.id());
  }
  bool queryEvent(void* event) const override {
    count("query");
    return !event || timeline().over(*static_cast<Event*>(event));
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    count("elapsed");
    return timeline().elapsed_ms(*static_cast<Event*>(first), *static_cast<Event*>(second));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    count("synchronize");
    if (event) timeline().wait_event(*static_cast<Event*>(event));
  }
  bool queryStream(const c10::Stream& stream) const override { return timeline().idle(stream.id()); }
  void synchronizeStream(const c10::Stream& stream) const override {
    count("synchronize");
    timeline().wait_stream(stream.id());
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    count("synchronize");
    timeline().wait_all();
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override { count("recordDataPtrOnStream"); }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    return pinned().count(data) > 0;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(c10::DeviceIndex) const override { timeline().wait_all(); }
};

}  // namespace

// --- kernels

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const auto* holder = static_cast<Holder*>(tensor.storage().data_ptr().get_context());
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (!holder) return at::empty_strided(tensor.sizes(), tensor.strides(), options);  // no bytes
  return at::from_blob(tensor.storage().unsafeGetStorageImpl()->mutable_data(), tensor.sizes(), tensor.strides(),
                       tensor.storage_offset(), [block = holder->block](void*) {}, options, std::nullopt);
}

namespace {

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           dtype.value_or(at::get_default_dtype_as_scalartype()));
}

// The same memory with other sizes.
at::Tensor view_of(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                         tensor.key_set(), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return result;
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return view_of(self, size, stride, offset.value_or(self.storage_offset()));
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  const auto inferred = at::infer_size_dv(size, self.numel());
  const auto stride = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride");
  return view_of(self, inferred, *stride, self.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return view_of(self, size, stride, self.storage_offset());
}

}  // namespace

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  auto data = allocator.allocate(bytes);
  const size_t kept = std::min(storage.nbytes(), bytes);
  if (kept) memcpy(data.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

namespace {

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t needed = (self.storage_offset() + self.numel()) * self.element_size();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) resize_storage(*storage, needed);
  return self;
}

at::Tensor& set_source(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                       at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_sizes_and_strides(size, stride.size() == size.size() ? stride : c10::contiguous_strides(size), offset);
  return self;
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_source(self, source, 0, {size}, {});
}

template <class Body>
Closure below_autograd(Body body) {
  return [body = std::move(body)] {
    at::AutoDispatchBelowADInplaceOrView guard;
    body();
  };
}

int64_t copying_ns(int64_t bytes) { return 5'000 + static_cast<int64_t>(bytes / settings().copy_bytes_per_ns); }

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  const bool between = self.is_cuda() && source.is_cuda();
  at::Tensor from = source;
  const at::Tensor& host = self.is_cpu() ? self : source;
  const bool staged = !between && !is_pinned(host);  // from or to memory that the device cannot reach by itself
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

// What of a call's stack is tensors, in all lists.
template <class Visit>
void for_each_tensor(c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    at::Tensor tensor = value.toTensor();
    visit(tensor);
    value = tensor;
  } else if (value.isTensorList()) {
    auto list = value.toTensorList().copy();
    for (size_t i = 0; i < list.size(); i++) {
      at::Tensor tensor = list.get(i);
      visit(tensor);
      list.set(i, tensor);
    }
    value = list;
  } else if (value.isOptionalTensorList()) {
    auto list = value.toOptionalTensorList().copy();
    for (size_t i = 0; i < list.size(); i++) {
      std::optional<at::Tensor> tensor = list.get(i);
      if (!tensor) continue;
      visit(*tensor);
      list.set(i, tensor);
    }
    value = list;
  }
}

at::Tensor on_meta(const at::Tensor& tensor) {
  auto result = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

using Stack = torch::jit::Stack;

Stack changed(const Stack& arguments, at::Tensor (*change)(const at::Tensor&)) {
  Stack result;
  for (const c10::IValue& argument : arguments) {
    c10::IValue copy = argument;
    if (copy.isDevice()) copy = c10::Device(change == &on_meta ? c10::kMeta : c10::kCPU);
    for_each_tensor(copy, [&](at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_cuda()) tensor = change(tensor);
    });
    result.push_back(std::move(copy));
  }
  return result;
}

// Results of the host's kernel as the device's: what shares memory with an argument is a view of that argument.
void return_results(const c10::FunctionSchema& schema, const Stack& arguments, const Stack& on_cpu, Stack& results) {
  for (size_t i = 0; i < results.size(); i++) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias && alias->isWrite()) {  // an argument that was written to
      for (size_t j = 0; j < arguments.size(); j++)
        if (const auto* of = schema.arguments()[j].alias_info(); of && *of == *alias) results[i] = arguments[j];
      continue;
    }
    for_each_tensor(results[i], [&](at::Tensor& tensor) {
      if (!tensor.defined()) return;
      at::Tensor found;
      for (size_t j = 0; j < arguments.size(); j++) {
        if (!arguments[j].isTensor() || !arguments[j].toTensor().defined() || !arguments[j].toTensor().is_cuda()) continue;
        if (tensor.has_storage() && tensor.nbytes() &&
            tensor.storage().data() == on_cpu[j].toTensor().storage().data())
          found = view_of(arguments[j].toTensor(), tensor.sizes(), tensor.strides(), tensor.storage_offset());
      }
      if (!found.defined()) {
        found = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(kDevice));
        on_host(found).copy_(tensor);
      }
      tensor = found;
    });
  }
}

// Every other operator: the CPU's kernel. At once where all that is before it on the stream has been done, else later,
// with results that are as large as the operator's meta kernel says.
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count_ = schema.arguments().size();
  const Stack arguments(stack->end() - static_cast<int64_t>(count_), stack->end());
  torch::jit::drop(*stack, count_);
  const int64_t stream = current_stream;
  auto task = [&](Closure data) { return Task{schema.name().substr(6), settings().kernel_ns, std::move(data)}; };
  at::AutoDispatchBelowADInplaceOrView guard;

  bool capturing = timeline().is_capturing(stream);
  if (capturing || !timeline().idle(stream)) {
    Stack results = changed(arguments, &on_meta);
    bool known = true;
    std::string why;
    try {
      op.callBoxed(&results);
    } catch (const std::exception& error) {
      known = false;  // its results' sizes depend on its data, or nobody has written them down
      why = error.what();
    }
    for (size_t i = 0; known && i < results.size(); i++) {
      const auto* alias = schema.returns()[i].alias_info();
      known = (results[i].isTensor() || results[i].isTensorList()) && (!alias || alias->isWrite());
    }
    if (known) {
      Stack on_cpu = changed(arguments, &on_host);
      std::vector<std::pair<size_t, std::vector<at::Tensor>>> made;
      for (size_t i = 0; i < results.size(); i++) {
        const auto* alias = schema.returns()[i].alias_info();
        if (alias) {
          for (size_t j = 0; j < arguments.size(); j++)
            if (const auto* of = schema.arguments()[j].alias_info(); of && *of == *alias) results[i] = arguments[j];
          continue;
        }
        auto& outputs = made.emplace_back(i, std::vector<at::Tensor>()).second;
        for_each_tensor(results[i], [&](at::Tensor& tensor) {
          if (tensor.defined())
            tensor = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(kDevice));
          outputs.push_back(on_host(tensor));
        });
      }
      timeline().put(stream, task(below_autograd([op, on_cpu, made] {
        Stack results = on_cpu;
        op.callBoxed(&results);
        for (const auto& [at, outputs] : made) {
          size_t next = 0;
          for_each_tensor(results[at], [&, &outputs = outputs](at::Tensor& tensor) {
            if (tensor.defined()) at::Tensor(outputs[next]).copy_(tensor);
            next++;
          });
        }
      })));
      for (auto& result : results) stack->push_back(std::move(result));
      return;
    }
    TORCH_CHECK(!capturing, "CUDA error: operation not permitted when stream is capturing (", schema.name(), ") ", why);
    timeline().drain(stream);
  }
  const Stack on_cpu = changed(arguments, &on_host);
  Stack results = on_cpu;
  below_autograd([&] { op.callBoxed(&results); })();
  return_results(schema, arguments, on_cpu, results);
  timeline().put(stream, task(nullptr));
  for (auto& result : results) stack->push_back(std::move(result));
}

struct Registered {
  Registered() {
    c10::SetAllocator(c10::DeviceType::CUDA, &allocator);
    at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
      return std::make_unique<Hooks>();
    });
  }
} registered;

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_source);
  library.impl("set_.source_Storage", &set_whole);
  library.impl("copy_", &copy_);
  library.impl("_local_scalar_dense", &local_scalar_dense);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace sleeping

// What a helper looks up in CUDA's runtime.
extern "C" {
__attribute__((visibility("default"))) int cudaStreamIsCapturing(void* stream, int* status) {
  *status = sleeping::timeline().is_capturing(reinterpret_cast<int64_t>(stream)) ? 1 : 0;
  return 0;
}
__attribute__((visibility("default"))) int cudaThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(sleeping::capture_mode, *mode);
  return 0;
}
}
