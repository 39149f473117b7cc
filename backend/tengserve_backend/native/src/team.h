// Work that threads share within one operator call, phase after phase.
//
// There is no barrier: a phase is over when all of its pieces are done, whoever did them. So a thread that comes late,
// or never, holds nobody up, and it makes no difference how many the runtime really has. It passes over what is done
// and joins in.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include <algorithm>

namespace tengserve {

// What the threads of a call have in common.
struct Team {
  int64_t threads = 1;
  // One ended by an exception: what it took will never be done, so nobody waits for it.
  std::atomic<bool> failed{false};
};

// How far a phase is. On two cache lines: those who take pieces must not disturb those who wait.
class Phase {
 public:
  void reset() {
    next_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
  }

  // Takes pieces and calls f(first, end) for them until there are no more, then waits for those that others took. What
  // was written for a piece is seen by all afterwards. Every thread of a team calls it with the same `pieces`.
  template <typename F>
  void share(int64_t pieces, const Team& team, F f) {
    int64_t mine = 0;
    for (;;) {
      // Many at once at the beginning, for neighbours lie together in memory, and single ones at the end.
      const int64_t left = pieces - next_.load(std::memory_order_relaxed);
      if (left <= 0) break;
      const int64_t wanted = std::max<int64_t>(1, left / (2 * team.threads));
      const int64_t first = next_.fetch_add(wanted, std::memory_order_relaxed);
      const int64_t end = std::min(pieces, first + wanted);
      if (first >= end) break;
      f(first, end);
      mine += end - first;
    }
    if (mine) done_.fetch_add(mine, std::memory_order_release);
    wait(pieces, team);
  }

 private:
  // A microsecond's wait costs less than giving the core away; a longer one means that another program has a core.
  static constexpr int kSpins = 300;

  void wait(int64_t pieces, const Team& team) const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < pieces; ++spins) {
      if (spins < kSpins) {
        pause();
        continue;
      }
      if (team.failed.load(std::memory_order_relaxed)) return;
      std::this_thread::yield();
    }
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }

  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace tengserve
