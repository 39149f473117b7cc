// Checks what the layers of a decoder are given, and cuts a call into steps of a bounded number of rows.
#include "decoder.h"

#include <ATen/ops/zeros.h>

#include "isa.h"

namespace tengserve {
namespace {

// Multiplications of a call below which no second thread is woken.
constexpr int64_t kWorthThreads = 1 << 18;
// Memory is reserved for a power of two of rows, at least these.
constexpr int64_t kLeastReserved = 16;
// Raises unless it is a packed weight [out, in]; how it keeps its numbers shows in its size.
PackedWeight any_packed_weight(const at::Tensor& packed, int64_t in, int64_t out, at::ScalarType dtype) {
  const int64_t groups = (in + kGroupInputs - 1) / kGroupInputs;
  const int64_t int4_bytes = sizeof(PanelFactors) + groups * static_cast<int64_t>(sizeof(Int4Group));
  const WeightKind kind = packed.dim() != 2              ? WeightKind::kFloat
                          : packed.size(1) == int4_bytes ? WeightKind::kInt4
                                                         : WeightKind::kInt8;
  return packed_weight(packed, kind, in, out, dtype);
}

// The part of a batch that has rows [begin, end): its sequences as if it were a step of its own.
class Cut {
 public:
  Cut(const Sequences& all, int64_t begin, int64_t end) {
    for (int64_t s = 0; s < all.size(); ++s) {
      const int64_t offset = all.offset(s), last = std::min(end, all.query_ends[s]);
      if (last <= begin || offset >= end) continue;
      if (ends_.empty()) first_ = s;
      ends_.push_back(last - begin);
      contexts_.push_back(all.start(s) + last - offset);
    }
  }
  int64_t first() const { return first_; }
  Sequences sequences() const { return {ends_, contexts_}; }

 private:
  int64_t first_ = 0;
  std::vector<int64_t> ends_, contexts_;
};

}  // namespace

Decoder::Decoder(int64_t hidden, int64_t heads, int64_t kv_heads, int64_t key_dim, int64_t value_dim,
                 int64_t intermediate)
    : sizes_{hidden, heads, kv_heads, key_dim, value_dim, intermediate} {
  // Products of sizes below it are no overflow.
  constexpr int64_t kMost = 1 << 24;
  for (const int64_t size : {hidden, heads, kv_heads, key_dim, value_dim, intermediate}) {
    TORCH_CHECK(size > 0 && size < kMost, "the sizes of a decoder must be from 1 to ", kMost - 1, ", not ", size);
  }
  TORCH_CHECK(heads % kv_heads == 0, "the ", heads, " query heads must be a multiple of the ", kv_heads,
              " key and value heads");
}

void Decoder::check_type(const at::Tensor& tensor, const char* name) const {
  if (type_.defined()) check_same_dtype(tensor, name, type_, "the first layer");
}

Decoder::Linear Decoder::linear(const char* name, at::Tensor packed, std::optional<at::Tensor> bias, int64_t in,
                                int64_t out, at::ScalarType dtype) const {
  check_tensor(packed, name, -1);
  const PackedWeight weight = any_packed_weight(packed, in, out, dtype);
  if (bias) {
    check_tensor(*bias, "bias", 1);
    TORCH_CHECK(bias->scalar_type() == dtype, "bias of ", name, " is ", bias->scalar_type(), " but its norm ", dtype);
    check_size(*bias, "bias", 0, out);
    check_contiguous(*bias, "bias");
  }
  return {std::move(packed), std::move(bias), weight};
}

Decoder::Norm Decoder::norm(const char* name, std::optional<at::Tensor> weight, double eps, int64_t size) const {
  if (weight) {
    check_float(*weight, name, 1);
    check_type(*weight, name);
    check_size(*weight, name, 0, size);
    check_contiguous(*weight, name);
  }
  return {std::move(weight), eps};
}

void Decoder::add_layer(at::Tensor attention_norm, double attention_eps, at::Tensor projected,
                        std::optional<at::Tensor> projected_bias, std::optional<at::Tensor> query_norm,
                        double query_eps, std::optional<at::Tensor> key_norm, double key_eps, at::Tensor output,
                        std::optional<at::Tensor> output_bias, at::Tensor mlp_norm, double mlp_eps,
                        at::Tensor gate_up, std::optional<at::Tensor> gate_up_bias, at::Tensor down,
                        std::optional<at::Tensor> down_bias, double scale, std::optional<int64_t> window,
                        bool rotary) {
  const std::lock_guard<std::mutex> alone(running_);
  TORCH_CHECK(!window || *window > 0, "window must be at least 1, not ", *window);
  TORCH_CHECK(!rotary || sizes_.key_dim % 2 == 0, "heads of ", sizes_.key_dim, " elements cannot be rotated by halves");
  check_float(attention_norm, "attention_norm", 1);
  const at::Tensor type = attention_norm;
  const at::ScalarType dtype = type.scalar_type();
  Layer layer{
      norm("attention_norm", std::move(attention_norm), attention_eps, sizes_.hidden),
      norm("query_norm", std::move(query_norm), query_eps, sizes_.key_dim),
      norm("key_norm", std::move(key_norm), key_eps, sizes_.key_dim),
      norm("mlp_norm", std::move(mlp_norm), mlp_eps, sizes_.hidden),
      linear("projected", std::move(projected), std::move(projected_bias), sizes_.hidden, sizes_.projected(), dtype),
      linear("output", std::move(output), std::move(output_bias), sizes_.attended(), sizes_.hidden, dtype),
      linear("gate_up", std::move(gate_up), std::move(gate_up_bias), sizes_.hidden, 2 * sizes_.intermediate, dtype),
      linear("down", std::move(down), std::move(down_bias), sizes_.intermediate, sizes_.hidden, dtype),
      scale,
      window.value_or(0),
      rotary,
  };
  for (const Norm* each : {&layer.query_norm, &layer.key_norm, &layer.mlp_norm}) {
    if (each->weight) check_same_dtype(*each->weight, "a norm's weight", type, "attention_norm");
  }
  for (const Linear* each : {&layer.projected, &layer.output, &layer.gate_up, &layer.down}) {
    parameters_ += each->weight.in * each->weight.out;
  }
  type_ = type;
  layers_.push_back(std::move(layer));
}

Pages Decoder::check_cache(const std::vector<at::Tensor>& keys, const std::vector<at::Tensor>& values) const {
  const int64_t layers = layers_.size();
  TORCH_CHECK(layers > 0, "the decoder has no layers");
  TORCH_CHECK(static_cast<int64_t>(keys.size()) == layers && static_cast<int64_t>(values.size()) == layers,
              "keys and values must be of ", layers, " layers, not ", keys.size(), " and ", values.size());
  Pages first{};
  for (int64_t i = 0; i < layers; ++i) {
    const Pages pages = check_pages(keys[i], values[i], kBlockSize);
    check_type(keys[i], "keys");
    if (i == 0) first = pages;
    TORCH_CHECK(pages.blocks == first.blocks, "keys of layer ", i, " have ", pages.blocks, " blocks, not ",
                first.blocks);
    TORCH_CHECK(pages.heads == sizes_.kv_heads && pages.key_dim == sizes_.key_dim &&
                    pages.value_dim == sizes_.value_dim,
                "keys and values of layer ", i, " must have ", sizes_.kv_heads, " heads of ", sizes_.key_dim, " and ",
                sizes_.value_dim, " elements");
  }
  return first;
}

at::Tensor Decoder::run(at::Tensor hidden, at::Tensor cos, at::Tensor sin, std::vector<at::Tensor> keys,
                        std::vector<at::Tensor> values, at::Tensor slots, at::Tensor block_table,
                        std::vector<int64_t> query_ends, std::vector<int64_t> contexts) {
  const std::lock_guard<std::mutex> alone(running_);
  const Pages pages = check_cache(keys, values);
  check_float(hidden, "hidden", 3);
  check_type(hidden, "hidden");
  check_size(hidden, "hidden", 0, 1);
  check_size(hidden, "hidden", 2, sizes_.hidden);
  const int64_t tokens = hidden.size(1);
  const auto check_angles = [&](const at::Tensor& x, const char* name) {
    check_tensor(x, name, 3);
    check_same_dtype(x, name, hidden, "hidden");
    check_size(x, name, 0, 1);
    check_size(x, name, 1, tokens);
    check_size(x, name, 2, sizes_.key_dim);
    check_contiguous(x, name);
  };
  check_angles(cos, "cos");
  check_angles(sin, "sin");
  const int64_t* numbers = check_slots(slots, tokens, pages);
  const Sequences sequences{query_ends, contexts};
  check_sequences(block_table, sequences, tokens, pages);
  at::Tensor out = hidden.clone(at::MemoryFormat::Contiguous);
  if (tokens == 0) return out;
  with_dtype(hidden, [&](auto t) {
    run_as<decltype(t)>(out, cos, sin, keys, values, numbers, block_table, sequences, pages);
  });
  return out;
}

template <typename T>
std::vector<LayerWeights<T>> Decoder::weights(const std::vector<at::Tensor>& keys,
                                              const std::vector<at::Tensor>& values) const {
  const auto of_norm = [](const Norm& norm) {
    return NormWeight<T>{norm.weight ? memory<const T>(*norm.weight) : nullptr, static_cast<float>(norm.eps)};
  };
  const auto of_linear = [](const Linear& linear) {
    return LinearWeight<T>{linear.weight, linear.bias ? memory<const T>(*linear.bias) : nullptr};
  };
  std::vector<LayerWeights<T>> all;
  all.reserve(layers_.size());
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    all.push_back({of_norm(layer.attention_norm), of_norm(layer.query_norm), of_norm(layer.key_norm),
                   of_norm(layer.mlp_norm), of_linear(layer.projected), of_linear(layer.output),
                   of_linear(layer.gate_up), of_linear(layer.down), static_cast<float>(layer.scale), layer.window,
                   layer.rotary, memory<T>(keys[i]), memory<T>(values[i])});
  }
  return all;
}

template <typename T>
StepMemory Decoder::reserve(const DecoderStep<T>& step, int64_t rows, int64_t threads) {
  int64_t whole = kLeastReserved;
  while (whole < rows) whole *= 2;
  const int64_t own = step.own_bytes();
  const int64_t bytes[] = {step.normed_bytes(whole), step.projected_bytes(whole), step.attended_bytes(whole),
                           step.act_bytes(whole),      step.gate_up_bytes(whole),   own * threads,
                           step.kept_bytes()};
  char* parts[std::size(bytes)];
  for (size_t i = 0; i < std::size(bytes); ++i) {
    at::Tensor& part = memory_[i];
    if (!part.defined() || part.numel() < bytes[i]) part = at::zeros({bytes[i]}, at::kByte);
    parts[i] = memory<char>(part);
  }
  return {parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], parts[6], own};
}

template <typename T>
void Decoder::run_as(const at::Tensor& hidden, const at::Tensor& cos, const at::Tensor& sin,
                     const std::vector<at::Tensor>& keys, const std::vector<at::Tensor>& values,
                     const int64_t* slots, const at::Tensor& block_table, const Sequences& sequences,
                     const Pages& pages) {
  const int64_t tokens = hidden.size(1), width = block_table.size(1);
  const int64_t threads = tokens * parameters_ < kWorthThreads ? 1 : at::get_num_threads();
  const std::vector<LayerWeights<T>> layers = weights<T>(keys, values);
  DecoderStep<T> step(level(), sizes_, layers, pages, threads);
  for (int64_t begin = 0; begin < tokens; begin += kStepRows) {
    const int64_t count = std::min(kStepRows, tokens - begin);
    const Cut cut(sequences, begin, begin + count);
    const StepRows<T> rows{count,
                           memory<T>(hidden) + begin * sizes_.hidden,
                           memory<const T>(cos) + begin * sizes_.key_dim,
                           memory<const T>(sin) + begin * sizes_.key_dim,
                           slots + begin,
                           cut.sequences(),
                           memory<const int32_t>(block_table) + cut.first() * width,
                           width};
    step.plan(rows);
    step.run(rows, reserve(step, count, threads));
  }
}

}  // namespace tengserve
