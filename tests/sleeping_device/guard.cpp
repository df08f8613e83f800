// What torch asks of a device: its streams and events (the guard) and CUDA's hooks; and what a profiler looks up in CUDA's
// runtime. Calls are counted.

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

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

}  // namespace

void count(const char* what) {
  std::lock_guard<std::mutex> lock(counting);
  counters()[what]++;
}

std::map<std::string, int64_t> counts() {
  std::lock_guard<std::mutex> lock(counting);
  return counters();
}

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
  bool queryStream(const c10::Stream& stream) const override { return timeline().over(stream.id()); }
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
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return allocator(); }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(c10::DeviceIndex) const override { timeline().wait_all(); }
};

struct RegisteredGuard {
  RegisteredGuard() {
    at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
      return std::make_unique<Hooks>();
    });
  }
} registered_guard;

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

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
