// CUDA graphs: whether a stream's calls are being captured into one, and how to ask for events all the same.
//
// While any thread captures, CUDA refuses a query of an event from every thread, and spoils the capture with it, unless
// the asking thread's mode is relaxed. An event that is put on a stream which is being captured becomes part of the
// graph and has no time. So nothing is put on such a stream, whoever began the capture, and queries are made relaxed.

#pragma once

#include <dlfcn.h>

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace dsprof {

// What the job has loaded of CUDA's runtime; nothing is loaded for this, and it need not be there.
class CudaRuntime {
 public:
  static const CudaRuntime& get() {
    static const CudaRuntime instance;
    return instance;
  }

  // cudaStreamIsCapturing(stream, status): status 0 is none, 1 active, 2 invalidated.
  int (*is_capturing)(void*, int*) = find<int (*)(void*, int*)>("cudaStreamIsCapturing");
  // cudaThreadExchangeStreamCaptureMode(mode): sets this thread's, gives the one before.
  int (*exchange_mode)(int*) = find<int (*)(int*)>("cudaThreadExchangeStreamCaptureMode");
  int (*last_error)() = find<int (*)()>("cudaGetLastError");

 private:
  template <class Function>
  static Function find(const char* name) {
    void* found = dlsym(RTLD_DEFAULT, name);
    for (const char* library : {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"}) {
      if (found) break;
      void* loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);  // null: the job has not loaded it
      if (loaded) found = dlsym(loaded, name);
    }
    return reinterpret_cast<Function>(found);
  }
};

// Whether what is put on this stream now goes into a graph. True, too, where CUDA does not answer.
template <class Guard = c10::impl::VirtualGuardImpl>
bool is_capturing(const Guard& guard, const c10::Stream& stream) try {
  const CudaRuntime& cuda = CudaRuntime::get();
  if constexpr (requires { guard.getStreamNativeHandle(stream); }) {
    if (cuda.is_capturing && stream.device_type() == c10::DeviceType::CUDA) {
      int status = 0;
      if (cuda.is_capturing(guard.getStreamNativeHandle(stream), &status) == 0) return status != 0;
      if (cuda.last_error) cuda.last_error();  // of our question: the job is not to find it
      return true;
    }
  }
  if constexpr (requires { guard.isStreamCapturing(stream); }) return guard.isStreamCapturing(stream);
  return false;
} catch (...) {
  return true;
}

// As long as it lives this thread may ask for events while others capture.
class RelaxedCapture {
 public:
  RelaxedCapture() {
    if (exchange_) exchange_(&mode_);
  }
  ~RelaxedCapture() {
    if (exchange_) exchange_(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  static constexpr int kRelaxed = 2;  // cudaStreamCaptureModeRelaxed
  int (*exchange_)(int*) = CudaRuntime::get().exchange_mode;
  int mode_ = kRelaxed;
};

}  // namespace dsprof
