// Causal attention of packed queries over their own sequences' pages.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <atomic>
#include <cmath>
#include <vector>

#include "attention_call.h"
#include "isa.h"
#include "operators.h"

namespace tengserve {
namespace {

// Scores of a call below which no second thread is woken.
constexpr int64_t kWorthThreads = 4096;

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
void attend_all(const AttentionCall<T>& call, T* out) {
  const Pages& pages = call.pages;
  const int64_t threads = at::get_num_threads();
  const AttentionPlan plan(call.sequences, call.rules, pages.heads, call.group, call.kernels.tile_rows, threads);
  const int64_t own = AttentionCall<T>::thread_memory(pages);
  std::vector<float> memory(threads * own + plan.sums * AttentionSums::size(pages.value_dim));
  float* const kept = memory.data() + threads * own;
  const int64_t query_heads = pages.heads * call.group;
  const auto answer = [&](int64_t token, int64_t head, auto write) {
    write(out + (token * query_heads + head) * pages.value_dim);
  };
  const bool worth = plan.scores * (pages.key_dim + pages.value_dim) / 128 >= kWorthThreads;
  run(plan.pieces.size(), worth, [&](int64_t piece, int64_t worker) {
    call.attend(plan, plan.pieces[piece], memory.data() + worker * own, kept, answer);
  });
  for (const SplitTile& split : plan.split) call.fold(plan, split, kept, answer);
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
    const AttentionCall<T> call{AttentionCall<T>::kernels_for(level().kernels<T>(), pages),
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
                                sinks ? memory<const float>(head_sinks) : nullptr};
    attend_all(call, memory<T>(out));
  });
  return out;
}

}  // namespace tengserve
