// One attention call as pieces of work that any thread may take: which tiles of query rows there are, over which keys,
// and what a piece computes. Bits do not depend on how it is cut.
#pragma once

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <vector>

#include "checks.h"
#include "kernels.h"
#include "pages.h"

namespace tengserve {

// Fewer tiles a thread than this, and a tile is split into the parts of its keys, for the threads would not be busy
// evenly.
constexpr int64_t kTilesAThread = 4;

struct AttentionRules {
  int64_t window, chunk;  // 0: none

  // The first position that a query sees; none after it sees an earlier one.
  int64_t first_key(int64_t position) const {
    int64_t first = 0;
    if (window) first = std::max(first, position - window + 1);
    if (chunk) first = std::max(first, position / chunk * chunk);
    return first;
  }
};

struct Sequences {
  at::IntArrayRef query_ends, contexts;

  int64_t size() const { return static_cast<int64_t>(contexts.size()); }
  int64_t offset(int64_t s) const { return s ? query_ends[s - 1] : 0; }
  int64_t count(int64_t s) const { return query_ends[s] - offset(s); }
  // Position of the sequence's first query.
  int64_t start(int64_t s) const { return contexts[s] - count(s); }
};

// Everything that later becomes an address. The block numbers are read once here and once by the kernels.
inline void check_sequences(const at::Tensor& block_table, const Sequences& sequences, int64_t tokens,
                            const Pages& pages) {
  const int64_t count = sequences.size();
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

inline int64_t next_part(int64_t position) {
  return (position / kPartKeys + 1) * kPartKeys;
}

// Calls f(begin, end) for each part of [begin, end).
template <typename F>
void each_part(int64_t begin, int64_t end, F f) {
  for (int64_t at = begin; at < end; at = next_part(at)) f(at, std::min(end, next_part(at)));
}

// Rows [row, row + rows) of a sequence's queries that share a key and value head: first by token, then by query head.
struct TilePlace {
  int64_t sequence, head, row;
  int rows;
  int64_t begin, end;  // positions that its rows see
};

// A tile, or one part of its keys.
struct AttentionPiece {
  int64_t tile;
  int64_t begin, end;
  int64_t sums;  // which of the sums that are kept; -1: all parts are folded at once
};

// A tile whose parts are computed apart; their sums follow one another.
struct SplitTile {
  int64_t tile, sums;
};

struct AttentionPlan {
  std::vector<TilePlace> tiles;
  std::vector<AttentionPiece> pieces;
  std::vector<SplitTile> split;  // folded once all pieces are done
  int64_t sums = 0;              // that are kept
  int64_t scores = 0;            // of all tiles
  bool whole = true;             // each piece has all queries of its sequence and head, and all of their keys

  // For `threads` threads that attend in tiles of tile_rows rows, group query heads to each of heads key heads.
  AttentionPlan(const Sequences& sequences, const AttentionRules& rules, int64_t heads, int64_t group,
                int64_t tile_rows, int64_t threads) {
    for (int64_t s = 0; s < sequences.size(); ++s) {
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
        whole = whole && parts <= 1;
      }
    }
    const bool few = threads > 1 && static_cast<int64_t>(tiles.size()) < kTilesAThread * threads;
    for (int64_t i = 0; i < static_cast<int64_t>(tiles.size()); ++i) {
      const TilePlace& place = tiles[i];
      scores += place.rows * (place.end - place.begin);
      if (few && next_part(place.begin) < place.end) {
        split.push_back({i, sums});
        whole = false;
        each_part(place.begin, place.end,
                  [&](int64_t begin, int64_t end) { pieces.push_back({i, begin, end, sums++}); });
      } else {
        pieces.push_back({i, place.begin, place.end, -1});
      }
    }
  }
};

// The queries and the pages that a plan is computed for.
template <typename T>
struct AttentionCall {
  const AttentionKernels<T>& kernels;
  Pages pages;
  Sequences sequences;
  AttentionRules rules;
  int64_t group;
  const T *query, *keys, *values;
  int64_t query_head_stride, query_token_stride;
  const int32_t* table;
  int64_t table_width;
  float scale, softcap;
  const float* sinks;

  static const AttentionKernels<T>& kernels_for(const Kernels<T>& all, const Pages& pages) {
    return pages.key_dim % 32 == 0 && pages.value_dim % 16 == 0 ? all.aligned_attention : all.any_attention;
  }

  // float32 numbers that a thread needs: the packed query and two sums, with a cache line between threads.
  static int64_t thread_memory(const Pages& pages) {
    return kMaxTileRows * pages.key_dim + 2 * AttentionSums::size(pages.value_dim) + 16;
  }

  // Computes a piece. `kept` is the memory of the plan's sums. Where the piece is a whole tile, its answers go to
  // answer(token, query head, write), which calls write(T*) with a place for value_dim elements.
  template <typename F>
  void attend(const AttentionPlan& plan, const AttentionPiece& piece, float* own, float* kept, F answer) const {
    const AttentionTile<T> prepared = tile(plan.tiles[piece.tile], own);
    const int64_t sums_size = AttentionSums::size(pages.value_dim);
    if (piece.sums >= 0) {
      kernels.attend(prepared, piece.begin, piece.end, AttentionSums::at(kept + piece.sums * sums_size));
      return;
    }
    const AttentionSums all = AttentionSums::at(own + kMaxTileRows * pages.key_dim);
    const AttentionSums part = AttentionSums::at(own + kMaxTileRows * pages.key_dim + sums_size);
    each_part(piece.begin, piece.end, [&](int64_t begin, int64_t end) {
      const bool first = begin == piece.begin;
      kernels.attend(prepared, begin, end, first ? all : part);
      if (!first) kernels.fold(all, part, prepared.rows, pages.value_dim);
    });
    finish(plan.tiles[piece.tile], all, answer);
  }

  // Puts the parts of a split tile together.
  template <typename F>
  void fold(const AttentionPlan& plan, const SplitTile& split, float* kept, F answer) const {
    const TilePlace& place = plan.tiles[split.tile];
    const int64_t sums_size = AttentionSums::size(pages.value_dim);
    const AttentionSums all = AttentionSums::at(kept + split.sums * sums_size);
    int64_t at = split.sums;
    each_part(place.begin, place.end, [&](int64_t begin, int64_t) {
      const AttentionSums part = AttentionSums::at(kept + at++ * sums_size);
      if (begin != place.begin) kernels.fold(all, part, place.rows, pages.value_dim);
    });
    finish(place, all, answer);
  }

 private:
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
    kernels.pack_query(tile);
    return tile;
  }

  template <typename F>
  void finish(const TilePlace& place, AttentionSums sums, F answer) const {
    for (int r = 0; r < place.rows; ++r) {
      const int64_t head = query_head(place, r);
      answer(token(place, r), head,
             [&](T* out) { kernels.finish(sums, r, pages.value_dim, sinks ? sinks + head : nullptr, out); });
    }
  }
};

}  // namespace tengserve
