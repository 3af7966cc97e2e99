// Progress words of a rank: what its thread does and since when, in memory that another process
// may read. Each begin of work or of a wait costs a few relaxed stores, of work also a look-up, and
// nothing where no words are bound.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

namespace tandem {

enum class RankActivity : uint32_t {
  work,  ///< computation: takes no longer than at other times
  wait,  ///< for a peer or the rendezvous store
  file,  ///< reading or writing of files, and waits for the threads that do so
};

struct ProgressWords {
  std::atomic<int64_t> since_ns;         ///< steady clock at the begin of the activity
  std::atomic<int64_t> longest_work_ns;  ///< longest work that has ended
  std::atomic<RankActivity> activity;
  std::atomic<int32_t> peer;          ///< world rank waited for; -1: none
  std::atomic<uint64_t> name[2];      ///< begin of the operator's name
  std::atomic<uint32_t> is_repeated;  ///< 1 in work of a kind that has ended before (WorkScope)
};

/// Words of the calling thread; nullptr: none.
inline constinit thread_local ProgressWords* progress_words = nullptr;

/// Operations of a thread, as hashes of their names and of the scope that they are in.
struct WorkHistory {
  uint64_t scope = 0;  ///< hash of the innermost WorkScope; 0: none
  std::unordered_set<uint64_t> of_ended_scopes, of_open_scope;
};
inline thread_local WorkHistory work_history;

inline uint64_t mix_hash(uint64_t hash, uint64_t value) {
  return (hash ^ value) * 0x9e3779b97f4a7c15u + (hash >> 29);
}

/// Whether a scope of this kind has ended in which there was an operation of this name.
inline bool note_work(const std::array<uint64_t, 2>& name) {
  WorkHistory& history = work_history;
  if (history.scope == 0) return false;
  const uint64_t work = mix_hash(mix_hash(history.scope, name[0]), name[1]);
  if (history.of_ended_scopes.contains(work)) return true;
  history.of_open_scope.insert(work);
  return false;
}

inline void begin_activity(RankActivity activity, std::string_view name,
                           std::chrono::steady_clock::time_point now, int peer = -1) {
  ProgressWords* const words = progress_words;
  if (!words) return;
  constexpr auto kRelaxed = std::memory_order_relaxed;
  const int64_t ns = std::chrono::nanoseconds(now.time_since_epoch()).count();
  const int64_t work = ns - words->since_ns.load(kRelaxed);
  if (words->activity.load(kRelaxed) == RankActivity::work &&
      work > words->longest_work_ns.load(kRelaxed)) {
    words->longest_work_ns.store(work, kRelaxed);
  }
  std::array<uint64_t, 2> letters{};
  std::memcpy(letters.data(), name.data(), std::min(name.size(), sizeof letters));
  for (size_t i = 0; i < letters.size(); ++i) words->name[i].store(letters[i], kRelaxed);
  words->is_repeated.store(activity == RankActivity::work && note_work(letters), kRelaxed);
  words->peer.store(peer, kRelaxed);
  words->activity.store(activity, kRelaxed);
  words->since_ns.store(ns, kRelaxed);
}

/// Step, validation or other work of a thread that is repeated. Its operations are expected to take
/// as long as those of the same name in an earlier one of the same kind and size, which has ended:
/// the first one has no such expectations.
class WorkScope {
 public:
  WorkScope(std::string_view kind, int64_t size) {
    uint64_t scope = mix_hash(uint64_t(size), kind.size());
    for (const char letter : kind) scope = mix_hash(scope, uint8_t(letter));
    outer_ = std::exchange(work_history.scope, scope | 1);
    of_outer_.swap(work_history.of_open_scope);
  }
  ~WorkScope() {
    WorkHistory& history = work_history;
    history.scope = outer_;
    history.of_ended_scopes.merge(history.of_open_scope);
    history.of_open_scope = std::move(of_outer_);
  }
  WorkScope(const WorkScope&) = delete;
  WorkScope& operator=(const WorkScope&) = delete;

 private:
  uint64_t outer_ = 0;
  std::unordered_set<uint64_t> of_outer_;
};

/// Activity of the calling thread.
inline RankActivity current_activity() {
  return progress_words ? progress_words->activity.load(std::memory_order_relaxed)
                        : RankActivity::work;
}

/// A wait for a peer (-1: for the rendezvous store), then again what was done before.
class WaitActivity {
 public:
  WaitActivity(std::string_view name, int peer) {
    if (!progress_words) return;
    before_ = progress_words->activity.load(std::memory_order_relaxed);
    begin_activity(RankActivity::wait, name, std::chrono::steady_clock::now(), peer);
  }
  ~WaitActivity() {
    if (progress_words) begin_activity(before_, "", std::chrono::steady_clock::now());
  }
  WaitActivity(const WaitActivity&) = delete;
  WaitActivity& operator=(const WaitActivity&) = delete;

 private:
  RankActivity before_ = RankActivity::work;
};

/// Operator's name in the words, which may be cut off.
inline std::string activity_name(const ProgressWords& words) {
  char text[17] = {};
  for (size_t i = 0; i < 2; ++i) {
    const uint64_t letters = words.name[i].load(std::memory_order_relaxed);
    std::memcpy(text + i * sizeof letters, &letters, sizeof letters);
  }
  return text;
}

}  // namespace tandem
