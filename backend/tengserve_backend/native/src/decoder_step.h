// All layers of a decoder for some rows, by whatever threads come. Pointers only: decoder.cpp has checked the tensors.
//
// Values are rounded where the operators one by one would round them, so the bits are theirs.
#pragma once

#include <ATen/Parallel.h>

#include <vector>

#include "attention_call.h"
#include "linear.h"
#include "team.h"

namespace tengserve {

// Rows that go through all layers together at most. More follow: causal attention needs only what was before.
constexpr int64_t kStepRows = 512;
// Up to so many rows each thread prepares a linear's input for itself, which is sooner done than waited for.
constexpr int64_t kOwnRows = 16;
// Bytes of x that panels are multiplied by in one go, at most: a good part of a second-level cache.
constexpr int64_t kBlockBytes = 1 << 20;
// Rows are split into no smaller parts, so that a panel's way into the cache is worth it, and at multiples of a tile.
constexpr int64_t kLeastRows = 96, kRowMultiple = 32;
// Results that a thread keeps of a linear until what follows it is done.
constexpr int64_t kOwnResults = 1 << 16;
// Phases that a layer has at most.
constexpr int64_t kLayerPhases = 10;

struct DecoderSizes {
  int64_t hidden, heads, kv_heads, key_dim, value_dim, intermediate;

  int64_t group() const { return heads / kv_heads; }
  int64_t queries() const { return heads * key_dim; }
  int64_t keys() const { return kv_heads * key_dim; }
  int64_t projected() const { return queries() + keys() + kv_heads * value_dim; }
  int64_t attended() const { return heads * value_dim; }
};

template <typename T>
struct LinearWeight {
  PackedWeight packed;
  const T* bias;  // or null

  // The same from a panel on.
  LinearWeight from(int64_t panel) const {
    LinearWeight rest = *this;
    rest.packed.panels += panel * packed.panel_bytes;
    rest.packed.out -= panel * kPanelColumns;
    if (bias) rest.bias += panel * kPanelColumns;
    return rest;
  }
};

template <typename T>
struct NormWeight {
  const T* weight;  // null: there is none
  float eps;
};

template <typename T>
struct LayerWeights {
  NormWeight<T> attention_norm, query_norm, key_norm, mlp_norm;
  LinearWeight<T> projected, output, gate_up, down;
  float scale;
  int64_t window;  // 0: none
  bool rotary;
  T *keys, *values;  // pages
};

// What the rows of one call need. Rows are [tokens, ...], one after the other.
template <typename T>
struct StepRows {
  int64_t count;
  T* hidden;            // [count, hidden], replaced by what the last layer gives
  const T *cos, *sin;   // [count, key_dim]
  const int64_t* slots;  // [count]
  Sequences sequences;
  const int32_t* table;
  int64_t table_width;
};

// Memory of a step, kept between steps. Each part is zero at first.
struct StepMemory {
  char *normed, *projected, *attended, *act, *gate_up, *own, *kept;
  int64_t own_bytes;
};

template <typename T>
class DecoderStep {
 public:
  DecoderStep(const Level& level, const DecoderSizes& sizes, const std::vector<LayerWeights<T>>& layers,
              const Pages& pages, int64_t threads)
      : kernels_(level.kernels<T>()),
        sizes_(sizes),
        layers_(layers),
        pages_(pages),
        phases_(layers.size() * kLayerPhases) {
    team_.threads = threads;
  }

  // Bytes of each part of the memory for a number of rows, in the order of StepMemory's.
  int64_t normed_bytes(int64_t rows) const { return rows > kOwnRows ? prepared(&LayerWeights<T>::projected, rows) : 0; }
  int64_t projected_bytes(int64_t rows) const { return rows * sizes_.projected() * sizeof(T); }
  int64_t attended_bytes(int64_t rows) const { return prepared(&LayerWeights<T>::output, rows); }
  int64_t act_bytes(int64_t rows) const { return prepared(&LayerWeights<T>::down, rows); }
  int64_t gate_up_bytes(int64_t rows) const { return panels_match() ? 0 : rows * 2 * sizes_.intermediate * sizeof(T); }
  // Of one thread: see Own.
  int64_t own_bytes() const {
    return aligned(prepared(&LayerWeights<T>::projected, kOwnRows)) + aligned(row_bytes()) + 2 * kResultsBytes +
           aligned(AttentionCall<T>::thread_memory(pages_) * sizeof(float));
  }
  // Of the sums that attention keeps, once it is planned.
  int64_t kept_bytes() const {
    int64_t sums = 0;
    for (const Plan& plan : plans_) sums = std::max(sums, plan.attention.sums);
    return sums * AttentionSums::size(sizes_.value_dim) * sizeof(float);
  }

  // Plans the attention of rows, for each window that layers have.
  void plan(const StepRows<T>& rows) {
    plans_.clear();
    const int64_t tile_rows = attention_kernels().tile_rows;
    for (const LayerWeights<T>& layer : layers_) {
      if (plan_of(layer.window) == nullptr) {
        plans_.push_back({layer.window, AttentionPlan(rows.sequences, {layer.window, 0}, sizes_.kv_heads,
                                                      sizes_.group(), tile_rows, team_.threads)});
      }
    }
  }

  // Computes the rows that were planned.
  void run(const StepRows<T>& rows, const StepMemory& memory) {
    for (Phase& phase : phases_) phase.reset();
    rows_ = rows;
    memory_ = memory;
    at::parallel_for(0, team_.threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; ++worker) {
        try {
          work(memory_.own + worker * memory_.own_bytes);
        } catch (...) {
          team_.failed.store(true, std::memory_order_relaxed);
          throw;
        }
      }
    });
  }

 private:
  struct Plan {
    int64_t window;
    AttentionPlan attention;
  };

  // A thread's memory.
  struct Own {
    char* normed;         // a few rows, prepared
    T* row;               // the longest
    T *results, *others;  // kOwnResults each
    float* attention;
  };

  static constexpr int64_t kResultsBytes = kOwnResults * sizeof(T);

  static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }
  int64_t prepared(LinearWeight<T> LayerWeights<T>::*weight, int64_t rows) const {
    // A tile's rows are there even where the last ones are not used.
    constexpr int64_t kTile = 16;
    return prepared_bytes<T>((layers_[0].*weight).packed, (rows + kTile - 1) / kTile * kTile);
  }
  int64_t row_bytes() const {
    return std::max({sizes_.hidden, sizes_.intermediate, sizes_.value_dim}) * static_cast<int64_t>(sizeof(T));
  }
  // Whether a panel of the gate has the same columns as one of the other half.
  bool panels_match() const { return sizes_.intermediate % kPanelColumns == 0; }
  const AttentionKernels<T>& attention_kernels() const { return AttentionCall<T>::kernels_for(kernels_, pages_); }
  const AttentionPlan* plan_of(int64_t window) const {
    for (const Plan& plan : plans_) {
      if (plan.window == window) return &plan.attention;
    }
    return nullptr;
  }

  Own own(char* memory) const {
    const auto take = [&](int64_t bytes) {
      char* const taken = memory;
      memory += aligned(bytes);
      return taken;
    };
    Own own{};
    own.normed = take(prepared(&LayerWeights<T>::projected, kOwnRows));
    own.row = reinterpret_cast<T*>(take(row_bytes()));
    own.results = reinterpret_cast<T*>(take(kResultsBytes));
    own.others = reinterpret_cast<T*>(take(kResultsBytes));
    own.attention = reinterpret_cast<float*>(memory);
    return own;
  }

  template <typename F>
  void share(Phase*& phase, int64_t pieces, F f) const {
    (phase++)->share(pieces, team_, f);
  }
  // f(piece), one by one.
  template <typename F>
  void share_each(Phase*& phase, int64_t pieces, F f) const {
    share(phase, pieces, [&](int64_t first, int64_t end) {
      for (int64_t piece = first; piece < end; ++piece) f(piece);
    });
  }

  void work(char* memory) {
    const Own mine = own(memory);
    Phase* phase = phases_.data();
    for (const LayerWeights<T>& layer : layers_) {
      Phase* const first = phase;
      project(phase, layer, mine);
      attend(phase, layer, mine);
      add_linear(phase, layer.output, memory_.attended, mine);
      activate(phase, layer, mine);
      add_linear(phase, layer.down, memory_.act, mine);
      phase = first + kLayerPhases;
    }
  }

  // A linear's pieces: blocks of rows, and in each of them panels, which are multiplied by the rows one after the other.
  struct Pieces {
    int64_t rows, block_rows, panels;
    int64_t count() const { return (rows + block_rows - 1) / block_rows * panels; }

    // Calls f(first row, rows, first panel, panels), `results` numbers at most.
    template <typename F>
    void each(int64_t first, int64_t end, int64_t results, F f) const {
      for (int64_t piece = first; piece < end;) {
        const int64_t row = piece / panels * block_rows, panel = piece % panels;
        const int64_t here = std::min(block_rows, rows - row);
        const int64_t most = std::max<int64_t>(1, results / (here * kPanelColumns));
        const int64_t count = std::min({panels - panel, end - piece, most});
        f(row, here, panel, count);
        piece += count;
      }
    }
  };
  Pieces pieces_of(const PackedWeight& weight, int64_t panels) const {
    const int64_t rows = rows_.count;
    const int64_t for_cache = (prepared_bytes<T>(weight, rows) + kBlockBytes - 1) / kBlockBytes;
    const int64_t for_threads = team_.threads > 1 ? (4 * team_.threads + panels - 1) / panels : 1;
    const int64_t most = (rows + kLeastRows - 1) / kLeastRows;
    const int64_t blocks = std::clamp(std::max(for_cache, for_threads), int64_t{1}, most);
    const int64_t block = (rows + blocks - 1) / blocks;
    return {rows, (block + kRowMultiple - 1) / kRowMultiple * kRowMultiple, panels};
  }
  // From a row that is a multiple of a tile's.
  static const char* rows_from(const PackedWeight& weight, const char* prepared, int64_t row) {
    return row ? prepared + prepared_bytes<T>(weight, row) : prepared;
  }

  // Calls f(first piece, end, normed rows) for pieces of a linear that follows a norm.
  template <typename F>
  void after_norm(Phase*& phase, const NormWeight<T>& norm, const PackedWeight& weight, const Own& mine,
                  int64_t pieces, F f) const {
    const auto prepare = [&](int64_t row, char* normed) {
      kernels_.row.rms_norm(rows_.hidden + row * sizes_.hidden, norm.weight, norm.eps, sizes_.hidden, mine.row);
      prepare_row(weight, mine.row, sizes_.hidden, row, normed);
    };
    if (rows_.count <= kOwnRows) {
      bool ready = false;
      share(phase, pieces, [&](int64_t first, int64_t end) {
        // Only who works reads the hidden rows: they change in later phases, which do not wait for anybody idle.
        if (!ready) {
          for (int64_t row = 0; row < rows_.count; ++row) prepare(row, mine.normed);
          ready = true;
        }
        f(first, end, mine.normed);
      });
      return;
    }
    share_each(phase, rows_.count, [&](int64_t row) { prepare(row, memory_.normed); });
    share(phase, pieces, [&](int64_t first, int64_t end) { f(first, end, memory_.normed); });
  }

  // A linear after a norm, all of it, into rows of `out`.
  void linear_after_norm(Phase*& phase, const NormWeight<T>& norm, const LinearWeight<T>& weight, T* out,
                         const Own& mine) const {
    const Pieces pieces = pieces_of(weight.packed, panel_count(weight.packed));
    after_norm(phase, norm, weight.packed, mine, pieces.count(), [&](int64_t first, int64_t end, const char* x) {
      pieces.each(first, end, INT64_MAX, [&](int64_t row, int64_t rows, int64_t panel, int64_t panels) {
        linear_panels<T>(weight.packed, rows_from(weight.packed, x, row), rows, panel, panel + panels, weight.bias,
                         out + row * weight.packed.out, weight.packed.out);
      });
    });
  }

  // Queries, keys and values of the normed rows.
  void project(Phase*& phase, const LayerWeights<T>& layer, const Own& mine) const {
    linear_after_norm(phase, layer.attention_norm, layer.projected, reinterpret_cast<T*>(memory_.projected), mine);
  }

  // Norms and rotates the queries of a key head and its key, in place, and writes the key and the value to their slot.
  void place_token(const LayerWeights<T>& layer, int64_t token, int64_t head) const {
    T* const row = reinterpret_cast<T*>(memory_.projected) + token * sizes_.projected();
    const int64_t dim = sizes_.key_dim;
    const auto finish = [&](T* x, const NormWeight<T>& norm) {
      if (norm.weight) kernels_.row.rms_norm(x, norm.weight, norm.eps, dim, x);
      if (layer.rotary) kernels_.row.rotary(x, rows_.cos + token * dim, rows_.sin + token * dim, dim, x);
    };
    for (int64_t q = head * sizes_.group(); q < (head + 1) * sizes_.group(); ++q) {
      finish(row + q * dim, layer.query_norm);
    }
    T* const key = row + sizes_.queries() + head * dim;
    finish(key, layer.key_norm);
    write_token<T>(pages_, key, row + sizes_.queries() + sizes_.keys() + head * sizes_.value_dim, rows_.slots[token],
                   head, layer.keys, layer.values);
  }

  void attend(Phase*& phase, const LayerWeights<T>& layer, const Own& mine) const {
    const AttentionPlan& plan = *plan_of(layer.window);
    const AttentionCall<T> call{attention_kernels(),
                                pages_,
                                rows_.sequences,
                                {layer.window, 0},
                                sizes_.group(),
                                reinterpret_cast<const T*>(memory_.projected),
                                layer.keys,
                                layer.values,
                                sizes_.key_dim,
                                sizes_.projected(),
                                rows_.table,
                                rows_.table_width,
                                layer.scale,
                                0.0f,
                                nullptr};
    float* const kept = reinterpret_cast<float*>(memory_.kept);
    const auto answer = [&](int64_t token, int64_t head, auto write) {
      write(mine.row);
      prepare_columns(layer.output.packed, mine.row, head * sizes_.value_dim, sizes_.value_dim, token,
                      memory_.attended);
    };
    const int64_t pieces = plan.pieces.size(), heads = sizes_.kv_heads;
    if (plan.whole) {
      // Nobody else needs the new keys of a piece's sequence.
      share_each(phase, pieces, [&](int64_t piece) {
        const TilePlace& place = plan.tiles[plan.pieces[piece].tile];
        const int64_t first = rows_.sequences.offset(place.sequence);
        for (int64_t t = 0; t < rows_.sequences.count(place.sequence); ++t) place_token(layer, first + t, place.head);
        call.attend(plan, plan.pieces[piece], mine.attention, kept, answer);
      });
      return;
    }
    share_each(phase, rows_.count * heads, [&](int64_t piece) { place_token(layer, piece / heads, piece % heads); });
    share_each(phase, pieces, [&](int64_t piece) {
      call.attend(plan, plan.pieces[piece], mine.attention, kept, answer);
    });
    if (plan.split.empty()) return;
    share_each(phase, plan.split.size(), [&](int64_t tile) { call.fold(plan, plan.split[tile], kept, answer); });
  }

  // hidden += linear(x)
  void add_linear(Phase*& phase, const LinearWeight<T>& weight, const char* x, const Own& mine) const {
    const Pieces pieces = pieces_of(weight.packed, panel_count(weight.packed));
    share(phase, pieces.count(), [&](int64_t first, int64_t end) {
      pieces.each(first, end, kOwnResults, [&](int64_t row, int64_t rows, int64_t panel, int64_t panels) {
        const LinearWeight<T> part = weight.from(panel);
        const int64_t stride = panels * kPanelColumns, columns = std::min(stride, part.packed.out);
        linear_panels<T>(part.packed, rows_from(weight.packed, x, row), rows, 0, panels, part.bias, mine.results,
                         stride);
        for (int64_t r = 0; r < rows; ++r) {
          T* const to = rows_.hidden + (row + r) * sizes_.hidden + panel * kPanelColumns;
          kernels_.row.add(to, mine.results + r * stride, columns, to);
        }
      });
    });
  }

  // silu(gate) * up of the normed rows.
  void activate(Phase*& phase, const LayerWeights<T>& layer, const Own& mine) const {
    const int64_t size = sizes_.intermediate;
    if (panels_match()) {
      const int64_t half = size / kPanelColumns;
      const PackedWeight& whole = layer.gate_up.packed;
      const Pieces pieces = pieces_of(whole, half);
      after_norm(phase, layer.mlp_norm, whole, mine, pieces.count(), [&](int64_t first, int64_t end, const char* x) {
        pieces.each(first, end, kOwnResults, [&](int64_t row, int64_t rows, int64_t panel, int64_t panels) {
          const LinearWeight<T> gate = layer.gate_up.from(panel), up = layer.gate_up.from(panel + half);
          const char* const from = rows_from(whole, x, row);
          const int64_t columns = panels * kPanelColumns;
          linear_panels<T>(gate.packed, from, rows, 0, panels, gate.bias, mine.results, columns);
          linear_panels<T>(up.packed, from, rows, 0, panels, up.bias, mine.others, columns);
          for (int64_t r = 0; r < rows; ++r) {
            T* const act = mine.results + r * columns;
            kernels_.row.silu_mul(act, mine.others + r * columns, columns, act);
            prepare_columns(layer.down.packed, act, panel * kPanelColumns, columns, row + r, memory_.act);
          }
        });
      });
      return;
    }
    T* const gate_up = reinterpret_cast<T*>(memory_.gate_up);
    linear_after_norm(phase, layer.mlp_norm, layer.gate_up, gate_up, mine);
    share_each(phase, rows_.count, [&](int64_t row) {
      const T* const gate = gate_up + row * 2 * size;
      kernels_.row.silu_mul(gate, gate + size, size, mine.row);
      prepare_row(layer.down.packed, mine.row, size, row, memory_.act);
    });
  }

  const Kernels<T>& kernels_;
  const DecoderSizes sizes_;
  const std::vector<LayerWeights<T>>& layers_;
  const Pages pages_;
  Team team_;
  std::vector<Phase> phases_;
  std::vector<Plan> plans_;
  StepRows<T> rows_{};
  StepMemory memory_{};
};

}  // namespace tengserve
