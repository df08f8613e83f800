// Level full: the floating-point operations of one step, by the shapes that each operator is given. A multiplication and
// an addition are two. What is counted are matrix products, convolutions and attention; nothing is run differently.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <map>
#include <optional>
#include <string_view>

#include "calls.hpp"

namespace dsprof {

// What an operation is for: of a forward that is trained, its backward, what that computes again, and anything else
// (evaluation, a teacher, the optimizer).
enum Part : uint8_t { kForwardPart, kBackwardPart, kAgainPart, kOtherPart };

inline thread_local bool trained = false;  // the outermost module call on this thread began with gradients on
inline thread_local uint32_t counted_depth = 0;  // inside an operator that is counted whole

struct Flops {
  double all = 0;
  double again = 0;  // of these, what attention's backward computes for a second time
};

using Inputs = c10::ArrayRef<const c10::IValue>;
using Shape = c10::IntArrayRef;

class FlopCounter {
 public:
  struct Key {
    uint16_t module;
    uint8_t part, dtype;
    bool operator<(const Key& other) const {
      return std::tie(module, part, dtype) < std::tie(other.module, other.part, other.dtype);
    }
  };

  void add(const Key& key, double flops) {
    std::lock_guard<std::mutex> lock(mutex_);
    flops_[key] += flops;
  }

  void miss(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (missed_.size() < 100 || missed_.count(name)) missed_[name]++;
  }

  void take(std::map<Key, double>& flops, std::map<std::string, uint64_t>& missed) {
    std::lock_guard<std::mutex> lock(mutex_);
    flops.swap(flops_);
    missed.swap(missed_);
    flops_.clear();
    missed_.clear();
  }

 private:
  std::mutex mutex_;
  std::map<Key, double> flops_;
  std::map<std::string, uint64_t> missed_;
};

inline FlopCounter& flop_counter() {
  static PerProcess<FlopCounter> instance;
  return instance.get();
}

// --- formulas: of the operator's inputs; none where they do not fit -----------------------------------

inline const at::Tensor* tensor_at(Inputs inputs, size_t i) {
  if (i >= inputs.size() || !inputs[i].isTensor()) return nullptr;
  const at::Tensor& tensor = inputs[i].toTensor();
  return tensor.defined() ? &tensor : nullptr;
}

inline double product(Shape shape) {
  double all = 1;
  for (const int64_t size : shape) all *= static_cast<double>(size);
  return all;
}

// The matrices are inputs `first` and the next. Batches go along, and of grouped products one side has none.
template <size_t first>
std::optional<Flops> matrix_product(Inputs inputs) {
  const at::Tensor *a = tensor_at(inputs, first), *b = tensor_at(inputs, first + 1);
  if (!a || !b || a->dim() < 1 || b->dim() < 1) return std::nullopt;
  const double columns = b->dim() == 1 ? 1 : static_cast<double>(b->size(-1));
  return Flops{2 * product(a->sizes()) * columns};
}

inline int64_t nth(const std::vector<int64_t>& list, size_t i) {
  return list.empty() ? 0 : list[list.size() == 1 ? 0 : i];
}

// Of each value at the output (transposed: at the input) as many products as the kernel has values for its channel.
inline double convolution(Shape input, Shape weight, Shape output, bool transposed) {
  return 2 * product(transposed ? input : output) * product(weight.slice(1));
}

inline std::optional<Flops> convolution_forward(Inputs inputs) {
  const at::Tensor *input = tensor_at(inputs, 0), *weight = tensor_at(inputs, 1);
  if (!input || !weight || inputs.size() < 9 || input->dim() < 3 || input->dim() != weight->dim()) return std::nullopt;
  const auto stride = inputs[3].toIntVector(), padding = inputs[4].toIntVector(), dilation = inputs[5].toIntVector();
  const bool transposed = inputs[6].toBool();
  std::vector<int64_t> output{input->size(0), weight->size(0)};
  for (int64_t i = 2; i < input->dim() && !transposed; i++) {
    const auto at = static_cast<size_t>(i - 2);
    const int64_t reach = nth(dilation, at) * (weight->size(i) - 1) + 1;
    output.push_back((input->size(i) + 2 * nth(padding, at) - reach) / std::max<int64_t>(nth(stride, at), 1) + 1);
  }
  return Flops{convolution(input->sizes(), weight->sizes(), output, transposed)};
}

inline std::optional<Flops> convolution_backward(Inputs inputs) {
  const at::Tensor *grad = tensor_at(inputs, 0), *input = tensor_at(inputs, 1), *weight = tensor_at(inputs, 2);
  if (!grad || !input || !weight || inputs.size() < 11) return std::nullopt;
  const auto wanted = inputs[10].toBoolList();  // of the input, the weight, the bias
  if (wanted.size() < 2) return std::nullopt;
  const double once = convolution(input->sizes(), weight->sizes(), grad->sizes(), inputs[7].toBool());
  return Flops{once * (wanted.get(0) + wanted.get(1))};
}

// Query, key and value, [batch, heads, length, width], from input `first` on. A causal mask saves nothing here.
struct Attention {
  double scores = 0, values = 0;  // a product of queries and keys; of scores and values
};

inline std::optional<Attention> attention(Inputs inputs, size_t first) {
  const at::Tensor *q = tensor_at(inputs, first), *k = tensor_at(inputs, first + 1), *v = tensor_at(inputs, first + 2);
  if (!q || !k || !v || q->dim() != 4 || k->dim() != 4 || v->dim() != 4) return std::nullopt;
  const double pairs = product(q->sizes().slice(0, 3)) * static_cast<double>(k->size(2));
  return Attention{2 * pairs * static_cast<double>(q->size(3)), 2 * pairs * static_cast<double>(v->size(3))};
}

inline std::optional<Flops> attention_forward(Inputs inputs) {
  const auto of = attention(inputs, 0);
  return of ? std::optional(Flops{of->scores + of->values}) : std::nullopt;
}

inline std::optional<Flops> attention_backward(Inputs inputs) {
  const auto of = attention(inputs, 1);
  return of ? std::optional(Flops{3 * of->scores + 2 * of->values, of->scores}) : std::nullopt;
}

inline std::optional<Flops> unknown(Inputs) { return std::nullopt; }

using Formula = std::optional<Flops> (*)(Inputs);

// Those of torch that have a formula, and those that compute much and have none.
inline const std::unordered_map<std::string_view, Formula>& formulas() {
  static const auto* table = new std::unordered_map<std::string_view, Formula>{
      {"aten::mm", &matrix_product<0>},
      {"aten::bmm", &matrix_product<0>},
      {"aten::mv", &matrix_product<0>},
      {"aten::dot", &matrix_product<0>},
      {"aten::vdot", &matrix_product<0>},
      {"aten::_int_mm", &matrix_product<0>},
      {"aten::_scaled_mm", &matrix_product<0>},
      {"aten::_grouped_mm", &matrix_product<0>},
      {"aten::_scaled_grouped_mm", &matrix_product<0>},
      {"aten::addmm", &matrix_product<1>},
      {"aten::addmm_", &matrix_product<1>},
      {"aten::_addmm_activation", &matrix_product<1>},
      {"aten::addmv", &matrix_product<1>},
      {"aten::addmv_", &matrix_product<1>},
      {"aten::baddbmm", &matrix_product<1>},
      {"aten::baddbmm_", &matrix_product<1>},
      {"aten::addbmm", &matrix_product<1>},
      {"aten::addbmm_", &matrix_product<1>},
      {"aten::convolution", &convolution_forward},
      {"aten::_convolution", &convolution_forward},
      {"aten::convolution_overrideable", &convolution_forward},
      {"aten::convolution_backward", &convolution_backward},
      {"aten::convolution_backward_overrideable", &unknown},
      {"aten::_scaled_dot_product_flash_attention", &attention_forward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", &attention_forward},
      {"aten::_scaled_dot_product_efficient_attention", &attention_forward},
      {"aten::_scaled_dot_product_cudnn_attention", &attention_forward},
      {"aten::_scaled_dot_product_fused_attention_overrideable", &attention_forward},
      {"aten::_scaled_dot_product_flash_attention_backward", &attention_backward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", &attention_backward},
      {"aten::_scaled_dot_product_efficient_attention_backward", &attention_backward},
      {"aten::_scaled_dot_product_cudnn_attention_backward", &attention_backward},
      {"aten::_scaled_dot_product_fused_attention_overrideable_backward", &unknown},
      {"aten::_flash_attention_forward", &unknown},
      {"aten::_flash_attention_backward", &unknown},
      {"aten::_efficient_attention_forward", &unknown},
      {"aten::_efficient_attention_backward", &unknown},
      {"aten::_cudnn_rnn", &unknown},
      {"aten::_cudnn_rnn_backward", &unknown},
      {"aten::miopen_rnn", &unknown},
      {"aten::miopen_rnn_backward", &unknown},
      {"aten::mkldnn_rnn_layer", &unknown},
      {"aten::mkldnn_rnn_layer_backward", &unknown},
      {"aten::mkldnn_linear", &unknown},
      {"aten::_weight_int4pack_mm", &unknown},
      {"aten::_weight_int8pack_mm", &unknown},
      {"aten::_trilinear", &unknown},
      {"aten::_sparse_addmm", &unknown},
      {"aten::_sparse_mm", &unknown},
  };
  return *table;
}

// Operators of others may compute anything: those that call nothing that is counted are named. torch's own that have no
// formula compute little.
inline bool is_foreign(const at::RecordFunction& op, std::string_view name) {
  static constexpr std::string_view ours[] = {"aten::", "prim::", "prims::", "c10d::", "_c10d_functional::",
                                              "_c10d_functional_autograd::", "fsdp::", "profiler::", "symm_mem::",
                                              "_dtensor::", "inductor::"};
  const auto begins = [name](std::string_view space) { return name.substr(0, space.size()) == space; };
  return std::none_of(std::begin(ours), std::end(ours), begins) && op.operator_name();  // else a scope with a name
}

inline bool has_tensor(Inputs inputs) {
  return std::any_of(inputs.begin(), inputs.end(),
                     [](const c10::IValue& value) { return value.isTensor() || value.isTensorList(); });
}

// A tensor that stands for others, or for none: a DTensor, or what a compiler traces with. What it stands for is seen
// when it comes.
inline bool stands_in(Inputs inputs) {
  for (const c10::IValue& value : inputs) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor& tensor = value.toTensor();
    if (tensor.is_meta() || tensor.key_set().has(c10::DispatchKey::Python) ||
        tensor.key_set().has(c10::DispatchKey::Functionalize))
      return true;
  }
  return false;
}

inline Part part_of_now() {
  if (torch::autograd::get_current_graph_task_id() == -1) {
    if (current_call.number || calls_inside) return trained ? kForwardPart : kOtherPart;
    return c10::GradMode::is_enabled() ? kForwardPart : kOtherPart;
  }
  if (!computing_depth) return kOtherPart;  // a hook, between two nodes
  const Computing& node = computing[computing_depth - 1];
  const bool again = calls_inside > node.calls_inside || (c10::GradMode::is_enabled() && !node.grad);
  return again ? kAgainPart : kBackwardPart;
}

inline uint16_t module_of_now(Part part) {
  if (part != kBackwardPart && part != kAgainPart) return current_call.name;
  const Computing& node = computing[computing_depth - 1];
  return calls_inside > node.calls_inside ? current_call.name : node.call.name;
}

struct Counted : at::ObserverContext {
  bool whole = false;   // what it calls is part of it
  std::string foreign;  // its name, if somebody else made it
  uint64_t before = 0;
};

inline thread_local uint64_t counted_here = 0;

inline std::unique_ptr<at::ObserverContext> operator_begins(const at::RecordFunction& op) try {
  if (counted_depth || !active.load(std::memory_order_acquire)) return nullptr;
  const std::string_view name = op.name();
  const auto found = formulas().find(name);
  if (found == formulas().end()) {
    if (!is_foreign(op, name) || !has_tensor(op.inputs()) || stands_in(op.inputs())) return nullptr;
    auto context = std::make_unique<Counted>();
    context->foreign = name;
    context->before = counted_here;
    return context;
  }
  const Inputs inputs = op.inputs();
  if (stands_in(inputs)) return nullptr;
  if (const auto flops = found->second(inputs)) {
    const at::Tensor* first = nullptr;
    for (size_t i = 0; i < 2; i++)  // addmm's first may be a bias of another type
      if (const at::Tensor* tensor = tensor_at(inputs, i)) first = tensor;
    const int type = first ? static_cast<int>(first->scalar_type()) + 1 : 0;
    const auto dtype = static_cast<uint8_t>(type < kDtypes ? type : 0);
    const Part part = part_of_now();
    const uint16_t module = module_of_now(part);
    flop_counter().add({module, part, dtype}, flops->all - flops->again);
    if (flops->again) flop_counter().add({module, part == kBackwardPart ? kAgainPart : part, dtype}, flops->again);
  } else {
    flop_counter().miss(std::string(name));
  }
  counted_here++;
  counted_depth++;
  auto context = std::make_unique<Counted>();
  context->whole = true;
  return context;
} catch (...) {
  count_error("operations of a step");
  return nullptr;
}

inline void operator_ends(const at::RecordFunction&, at::ObserverContext* context) {
  if (!context) return;
  const Counted& op = *static_cast<Counted*>(context);
  if (op.whole) {
    counted_depth--;
  } else if (counted_here == op.before) {
    try {
      flop_counter().miss(op.foreign);
    } catch (...) {
      count_error("operations of a step");
    }
  }
}

inline Observer operators_observer;

inline void stop_counting() { operators_observer.remove(); }

inline void start_counting() {
  stop_counting();
  std::map<FlopCounter::Key, double> flops;
  std::map<std::string, uint64_t> missed;
  flop_counter().take(flops, missed);
  at::RecordFunctionCallback callback(&operator_begins, &operator_ends);
  operators_observer.add(callback.needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace dsprof
