// Causal attention of packed queries over their own sequences' pages.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "isa.h"
#include "operators.h"
#include "pages.h"

namespace tengserve {
namespace {

// Fewer tiles a thread than this, and a tile is split into the parts of its keys, for the threads would not be busy
// evenly.
constexpr int64_t kTilesAThread = 4;
// Scores of a call below which no second thread is woken.
constexpr int64_t kWorthThreads = 4096;

struct Rules {
  int64_t window, chunk;  // 0: none

  // The first position that a query sees; none after it sees an earlier one.
  int64_t first_key(int64_t position) const {
    int64_t first = 0;
    if (window) first = std::max(first, position - window + 1);
    if (chunk) first = std::max(first, position / chunk * chunk);
    return first;
  }
};

// Rows [row, row + rows) of a sequence's queries that share a key and value head: first by token, then by query head.
struct TilePlace {
  int64_t sequence, head, row;
  int rows;
  int64_t begin, end;  // positions that its rows see
};

// A tile, or one part of its keys.
struct Task {
  int64_t tile;
  int64_t begin, end;
  int64_t sums;  // which of the sums that are kept; -1: all parts are folded at once
};

struct Sequences {
  at::IntArrayRef query_ends, contexts;

  int64_t offset(int64_t s) const { return s ? query_ends[s - 1] : 0; }
  int64_t count(int64_t s) const { return query_ends[s] - offset(s); }
  // Position of the sequence's first query.
  int64_t start(int64_t s) const { return contexts[s] - count(s); }
};

int64_t next_part(int64_t position) {
  return (position / kPartKeys + 1) * kPartKeys;
}

// Calls f(begin, end) for each part of [begin, end).
template <typename F>
void each_part(int64_t begin, int64_t end, F f) {
  for (int64_t at = begin; at < end; at = next_part(at)) f(at, std::min(end, next_part(at)));
}

std::vector<TilePlace> place_tiles(const Sequences& sequences, const Rules& rules, int64_t heads, int64_t group,
                                   int64_t tile_rows) {
  std::vector<TilePlace> tiles;
  for (int64_t s = 0; s < static_cast<int64_t>(sequences.contexts.size()); ++s) {
    const int64_t rows = sequences.count(s) * group, start = sequences.start(s);
    const int64_t parts = (rows + tile_rows - 1) / tile_rows;
    for (int64_t h = 0; h < heads; ++h) {
      // Nearly equal tiles: a last one of one row would read all the keys for it.
      for (int64_t part = 0, row = 0; part < parts; ++part) {
        const int64_t taken = (rows - row + parts - part - 1) / (parts - part);
        tiles.push_back({s, h, row, static_cast<int>(taken), rules.first_key(start + row / group),
                         start + (row + taken - 1) / group + 1});
        row += taken;
      }
    }
  }
  return tiles;
}

// Runs f(task, worker) for each task on all threads. Tasks differ in cost, so each thread takes the next that is left.
template <typename F>
void run(int64_t tasks, bool threads, F f) {
  std::atomic<int64_t> next{0};
  const int64_t workers = threads ? std::min<int64_t>(tasks, at::get_num_threads()) : 1;
  at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t task; (task = next.fetch_add(1)) < tasks;) f(task, worker);
    }
  });
}

template <typename T>
struct Call {
  const Level& level;
  Pages pages;
  Sequences sequences;
  Rules rules;
  int64_t group;
  const T *query, *keys, *values;
  int64_t query_head_stride, query_token_stride;
  const int32_t* table;
  int64_t table_width;
  float scale, softcap;
  const float* sinks;
  T* out;

  const AttentionKernels<T>& kernels() const {
    const Kernels<T>& all = level.kernels<T>();
    return pages.key_dim % 32 == 0 && pages.value_dim % 16 == 0 ? all.aligned_attention : all.any_attention;
  }
  int64_t query_head(const TilePlace& place, int r) const { return place.head * group + (place.row + r) % group; }
  int64_t token(const TilePlace& place, int r) const {
    return sequences.offset(place.sequence) + (place.row + r) / group;
  }

  AttentionTile<T> tile(const TilePlace& place, float* packed) const {
    AttentionTile<T> tile{};
    tile.keys = keys + place.head * kBlockSize * pages.key_dim;
    tile.values = values + place.head * kBlockSize * pages.value_dim;
    tile.keys_a_block = pages.heads * kBlockSize * pages.key_dim;
    tile.values_a_block = pages.heads * kBlockSize * pages.value_dim;
    tile.blocks = table + place.sequence * table_width;
    tile.key_dim = pages.key_dim;
    tile.value_dim = pages.value_dim;
    tile.rows = place.rows;
    for (int r = 0; r < place.rows; ++r) {
      tile.query[r] = query + query_head(place, r) * query_head_stride + token(place, r) * query_token_stride;
      tile.last[r] = sequences.start(place.sequence) + (place.row + r) / group;
      tile.first[r] = rules.first_key(tile.last[r]);
    }
    tile.scale = scale;
    tile.softcap = softcap;
    tile.packed = packed;
    kernels().pack_query(tile);
    return tile;
  }

  void finish(const TilePlace& place, AttentionSums sums) const {
    const int64_t query_heads = pages.heads * group;
    for (int r = 0; r < place.rows; ++r) {
      const int64_t head = query_head(place, r);
      kernels().finish(sums, r, pages.value_dim, sinks ? sinks + head : nullptr,
                       out + (token(place, r) * query_heads + head) * pages.value_dim);
    }
  }

  void run_all() const {
    const std::vector<TilePlace> tiles =
        place_tiles(sequences, rules, pages.heads, group, kernels().tile_rows);
    const int64_t threads = at::get_num_threads();
    const bool split = threads > 1 && static_cast<int64_t>(tiles.size()) < kTilesAThread * threads;
    std::vector<Task> tasks;
    std::vector<int64_t> kept;  // tiles whose sums are kept, in order
    int64_t sums = 0, scores = 0;
    for (int64_t i = 0; i < static_cast<int64_t>(tiles.size()); ++i) {
      const TilePlace& place = tiles[i];
      scores += place.rows * (place.end - place.begin);
      if (split && next_part(place.begin) < place.end) {
        kept.push_back(i);
        each_part(place.begin, place.end,
                  [&](int64_t begin, int64_t end) { tasks.push_back({i, begin, end, sums++}); });
      } else {
        tasks.push_back({i, place.begin, place.end, -1});
      }
    }
    // A worker's memory: the packed query and two sums, with a cache line between workers.
    const int64_t sums_size = AttentionSums::size(pages.value_dim);
    const int64_t packed_size = kMaxTileRows * pages.key_dim;
    const int64_t own = packed_size + 2 * sums_size + 16;
    std::vector<float> memory(threads * own + sums * sums_size);
    float* const sums_memory = memory.data() + threads * own;
    const bool worth = scores * (pages.key_dim + pages.value_dim) / 128 >= kWorthThreads;

    run(tasks.size(), worth, [&](int64_t number, int64_t worker) {
      const Task& task = tasks[number];
      float* const mine = memory.data() + worker * own;
      const AttentionTile<T> prepared = tile(tiles[task.tile], mine);
      if (task.sums >= 0) {
        kernels().attend(prepared, task.begin, task.end,
                         AttentionSums::at(sums_memory + task.sums * sums_size));
        return;
      }
      const AttentionSums all = AttentionSums::at(mine + packed_size);
      const AttentionSums part = AttentionSums::at(mine + packed_size + sums_size);
      each_part(task.begin, task.end, [&](int64_t begin, int64_t end) {
        const bool first = begin == task.begin;
        kernels().attend(prepared, begin, end, first ? all : part);
        if (!first) kernels().fold(all, part, prepared.rows, pages.value_dim);
      });
      finish(tiles[task.tile], all);
    });

    int64_t at = 0;
    for (const int64_t i : kept) {
      const TilePlace& place = tiles[i];
      const AttentionSums all = AttentionSums::at(sums_memory + at * sums_size);
      each_part(place.begin, place.end, [&](int64_t begin, int64_t) {
        const AttentionSums part = AttentionSums::at(sums_memory + at++ * sums_size);
        if (begin != place.begin) kernels().fold(all, part, place.rows, pages.value_dim);
      });
      finish(place, all);
    }
  }
};

// Everything that later becomes an address. The block numbers are read once here and once by the kernels.
void check_sequences(const at::Tensor& block_table, const Sequences& sequences, int64_t tokens, const Pages& pages) {
  const int64_t count = sequences.contexts.size();
  TORCH_CHECK(static_cast<int64_t>(sequences.query_ends.size()) == count, "query_ends has ",
              sequences.query_ends.size(), " sequences but contexts ", count);
  check_tensor(block_table, "block_table", 2);
  TORCH_CHECK(block_table.scalar_type() == at::kInt, "block_table must be int32, not ", block_table.scalar_type());
  check_contiguous(block_table, "block_table");
  check_size(block_table, "block_table", 0, count);
  const int64_t width = block_table.size(1);
  const int32_t* table = memory<const int32_t>(block_table);
  for (int64_t s = 0; s < count; ++s) {
    const int64_t end = sequences.query_ends[s], context = sequences.contexts[s];
    TORCH_CHECK(end >= sequences.offset(s) && end <= tokens, "query_ends must rise from 0 to the ", tokens,
                " tokens of the query; that of sequence ", s, " is ", end);
    TORCH_CHECK(context >= sequences.count(s) && context <= width * kBlockSize, "the context of sequence ", s, ", ",
                context, ", must be at least its ", sequences.count(s), " queries and fit its ", width, " blocks");
    for (int64_t b = 0; b * kBlockSize < context; ++b) {
      const int32_t block = table[s * width + b];
      TORCH_CHECK(block >= 0 && block < pages.blocks, "block ", block, " of sequence ", s, " is outside the ",
                  pages.blocks, " blocks of the cache");
    }
  }
  TORCH_CHECK((count ? sequences.query_ends.back() : 0) == tokens, "query_ends must end at the ", tokens,
              " tokens of the query");
}

}  // namespace

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                           const at::Tensor& block_table, at::IntArrayRef query_ends, at::IntArrayRef contexts,
                           int64_t block_size, double scale, std::optional<int64_t> window,
                           std::optional<int64_t> chunk, std::optional<double> softcap,
                           const std::optional<at::Tensor>& sinks) {
  const Pages pages = check_pages(keys, values, block_size);
  check_float(query, "query", 3);
  check_same_dtype(query, "query", keys, "keys");
  check_contiguous_rows(query, "query");
  check_size(query, "query", 2, pages.key_dim);
  const int64_t query_heads = query.size(0), tokens = query.size(1);
  TORCH_CHECK(query_heads > 0 && query_heads % pages.heads == 0, "the ", query_heads,
              " query heads must be a multiple of the ", pages.heads, " key and value heads");
  const Sequences sequences{query_ends, contexts};
  check_sequences(block_table, sequences, tokens, pages);
  TORCH_CHECK(!window || *window > 0, "window must be at least 1, not ", *window);
  TORCH_CHECK(!chunk || *chunk > 0, "chunk must be at least 1, not ", *chunk);
  TORCH_CHECK(!softcap || (std::isfinite(*softcap) && *softcap > 0), "softcap must be more than 0, not ", *softcap);
  at::Tensor head_sinks;
  if (sinks) {
    check_float(*sinks, "sinks", 1);
    check_size(*sinks, "sinks", 0, query_heads);
    head_sinks = sinks->to(at::kFloat).contiguous();
  }
  at::Tensor out = at::empty({tokens, query_heads, pages.value_dim}, query.options());
  if (tokens == 0) return out;
  with_dtype(query, [&](auto t) {
    using T = decltype(t);
    const Call<T> call{level(),
                       pages,
                       sequences,
                       {window.value_or(0), chunk.value_or(0)},
                       query_heads / pages.heads,
                       memory<const T>(query),
                       memory<const T>(keys),
                       memory<const T>(values),
                       query.stride(0),
                       query.stride(1),
                       memory<const int32_t>(block_table),
                       block_table.size(1),
                       static_cast<float>(scale),
                       static_cast<float>(softcap.value_or(0)),
                       sinks ? memory<const float>(head_sinks) : nullptr,
                       memory<T>(out)};
    call.run_all();
  });
  return out;
}

}  // namespace tengserve
