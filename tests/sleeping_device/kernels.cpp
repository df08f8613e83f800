// Kernels: every operator that has none of its own here is the CPU's, and lasts as long as `settings` says.

#include <ATen/ops/copy.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "device.hpp"
#include "timeline.hpp"

namespace sleeping {
namespace {

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
  if (capturing || !timeline().drained(stream)) {
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

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace sleeping
