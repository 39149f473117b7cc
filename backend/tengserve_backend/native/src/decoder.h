// The layers of a decoder as one operator over weights that are checked once.
#pragma once

#include <torch/custom_class.h>

#include <mutex>
#include <optional>
#include <vector>

#include "decoder_step.h"

namespace tengserve {

// Pre-norm layers of one shape:
//   hidden += output(attention(rotary(norm(queries, keys of projected(norm(hidden))))))
//   hidden += down(silu(gate) * up) of gate_up(norm(hidden))
// Python sees it as torch.classes.tengserve_cpu.Decoder. It keeps the tensors it is given, and memory for a step.
class Decoder : public torch::CustomClassHolder {
 public:
  // heads query heads of key_dim elements; kv_heads of key_dim and value_dim.
  Decoder(int64_t hidden, int64_t heads, int64_t kv_heads, int64_t key_dim, int64_t value_dim, int64_t intermediate);

  // The next layer. Weights are packed by pack_linear or its like: `projected` gives queries, keys and values, `gate_up`
  // the gate first. Other tensors are of one type in all layers. query_norm and key_norm are of a head. Scores are multiplied by
  // `scale`; a query sees `window` keys, itself included.
  void add_layer(at::Tensor attention_norm, double attention_eps, at::Tensor projected,
                 std::optional<at::Tensor> projected_bias, std::optional<at::Tensor> query_norm, double query_eps,
                 std::optional<at::Tensor> key_norm, double key_eps, at::Tensor output,
                 std::optional<at::Tensor> output_bias, at::Tensor mlp_norm, double mlp_eps, at::Tensor gate_up,
                 std::optional<at::Tensor> gate_up_bias, at::Tensor down, std::optional<at::Tensor> down_bias,
                 double scale, std::optional<int64_t> window, bool rotary);

  // Runs all layers over packed rows, and puts their keys and values into the cache. hidden [1, T, hidden]; cos and sin
  // [1, T, key_dim]; keys and values: of each layer, as paged_write takes them; slots int64 [T]; block_table, query_ends
  // and contexts as paged_attention takes them. Gives [1, T, hidden].
  at::Tensor run(at::Tensor hidden, at::Tensor cos, at::Tensor sin, std::vector<at::Tensor> keys,
                 std::vector<at::Tensor> values, at::Tensor slots, at::Tensor block_table,
                 std::vector<int64_t> query_ends, std::vector<int64_t> contexts);

 private:
  struct Linear {
    at::Tensor packed;
    std::optional<at::Tensor> bias;
    PackedWeight weight;
  };
  struct Norm {
    std::optional<at::Tensor> weight;
    double eps;
  };
  struct Layer {
    Norm attention_norm, query_norm, key_norm, mlp_norm;
    Linear projected, output, gate_up, down;
    double scale;
    int64_t window;
    bool rotary;
  };

  Linear linear(const char* name, at::Tensor packed, std::optional<at::Tensor> bias, int64_t in, int64_t out,
                at::ScalarType dtype) const;
  Norm norm(const char* name, std::optional<at::Tensor> weight, double eps, int64_t size) const;
  void check_type(const at::Tensor& tensor, const char* name) const;
  Pages check_cache(const std::vector<at::Tensor>& keys, const std::vector<at::Tensor>& values) const;
  template <typename T>
  void run_as(const at::Tensor& hidden, const at::Tensor& cos, const at::Tensor& sin,
              const std::vector<at::Tensor>& keys, const std::vector<at::Tensor>& values, const int64_t* slots,
              const at::Tensor& block_table, const Sequences& sequences, const Pages& pages);
  template <typename T>
  std::vector<LayerWeights<T>> weights(const std::vector<at::Tensor>& keys,
                                       const std::vector<at::Tensor>& values) const;
  template <typename T>
  StepMemory reserve(const DecoderStep<T>& step, int64_t rows, int64_t threads);

  DecoderSizes sizes_;
  at::Tensor type_;  // the first layer's norm
  std::vector<Layer> layers_;
  int64_t parameters_ = 0;
  std::mutex running_;       // one step at a time: they share the memory
  at::Tensor memory_[7];     // the parts of StepMemory
};

}  // namespace tengserve
