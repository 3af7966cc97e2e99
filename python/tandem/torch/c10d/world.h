// Ranks of a process group: tandem's functions (table.h) with exceptions of PyTorch.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "table.h"

namespace tandem_c10d {

using Seconds = std::chrono::duration<double>;

struct GroupArguments {
  c10::intrusive_ptr<c10d::Store> store;
  int rank, size;
  double deadline_s;
  std::vector<int64_t> global_ranks;  ///< empty: 0 to size - 1
  std::string wire;
  bool allow_uncompressed;
};

inline void throw_error(const TandemError& error, const std::string& note = "") {
  const char* const limit = error.kind == kTandemTimeout ? " within the timeout of the group" : "";
  C10_THROW_ERROR(DistBackendError, error.text + note + limit);
}

/// Rendezvous over the group's store. Polls, since a wait would lock the store for other threads.
/// Keys have the number of this process's groups of that name, since a store may outlive a group.
class StoreGather {
 public:
  explicit StoreGather(const GroupArguments& arguments)
      : arguments_(arguments),
        prefix_("tandem/" +
                std::to_string(
                    arguments.store->add("tandem/groups/" + std::to_string(arguments.rank), 1)) +
                "/") {}

  std::vector<uint8_t> operator()(const uint8_t* local, uint64_t bytes) {
    const std::string round = prefix_ + std::to_string(++rounds_) + "/";
    arguments_.store->set(round + std::to_string(arguments_.rank),
                          std::vector<uint8_t>(local, local + bytes));
    const auto until = std::chrono::steady_clock::now() + Seconds(arguments_.deadline_s);
    std::vector<uint8_t> all;
    for (int rank = 0; rank < arguments_.size; ++rank) {
      const std::string key = round + std::to_string(rank);
      auto pause = std::chrono::microseconds(100);
      while (!arguments_.store->check({key})) {
        if (std::chrono::steady_clock::now() > until) {
          C10_THROW_ERROR(DistBackendError,
                          "connect: rank " + std::to_string(rank) + " of " +
                              std::to_string(arguments_.size) +
                              " has not come within the deadline: expected all ranks of the "
                              "group");
        }
        std::this_thread::sleep_for(pause);
        pause = std::min<std::chrono::microseconds>(2 * pause, std::chrono::milliseconds(20));
      }
      const std::vector<uint8_t> remote = arguments_.store->get(key);
      all.insert(all.end(), remote.begin(), remote.end());
    }
    return all;
  }

  /// For TandemWorldArguments. Exceptions do not leave C functions: keeps the text.
  static bool call(void* self, const void* local, uint64_t bytes, void* all) {
    auto& gather = *static_cast<StoreGather*>(self);
    try {
      const auto gathered = gather(static_cast<const uint8_t*>(local), bytes);
      const uint64_t expected = bytes * uint64_t(gather.arguments_.size);
      TORCH_CHECK(gathered.size() == expected, "connect: the store has ", gathered.size(),
                  " bytes: expected ", expected);
      std::memcpy(all, gathered.data(), gathered.size());
      return true;
    } catch (const c10::Error& error) {
      gather.failure_ = error.what_without_backtrace();
    } catch (const std::exception& error) {
      gather.failure_ = error.what();
    }
    return false;
  }
  const std::string& failure() const { return failure_; }

 private:
  const GroupArguments& arguments_;
  const std::string prefix_;
  int rounds_ = 0;
  std::string failure_;
};

/// Calls come from one thread, except `abort`, `bytes_sent` and `post`.
class World {
 public:
  World(const TandemTable& table, const GroupArguments& arguments)
      : table_(table),
        rank_(arguments.rank),
        size_(arguments.size),
        is_encoded_(!arguments.wire.empty()) {
    StoreGather gather(arguments);
    const TandemWorldArguments passed{.rank = rank_,
                                      .size = size_,
                                      .deadline_s = arguments.deadline_s,
                                      .wire = arguments.wire.c_str(),
                                      .allow_uncompressed = arguments.allow_uncompressed,
                                      .gather = &StoreGather::call,
                                      .context = &gather};
    TandemError error;
    handle_ = table.connect(&passed, &error);
    if (!handle_ && !gather.failure().empty()) {
      C10_THROW_ERROR(DistBackendError, gather.failure());
    }
    if (!handle_) throw_error(error);
    name_ranks(arguments.global_ranks);
  }
  ~World() { table_.close(handle_); }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool is_encoded() const { return is_encoded_; }
  uint64_t bytes_sent() const { return table_.bytes_sent(handle_); }
  /// Suffix of a subgroup's errors: its ranks in the default group.
  const std::string& note() const { return note_; }

  void abort(const std::string& reason) { table_.abort(handle_, reason.c_str()); }
  void share_processors(int ranks) { table_.share_processors(ranks); }
  void set_deadline(double seconds) { table_.set_deadline(handle_, seconds); }
  void require_same(const char* what, const std::string& value) {
    run([&](TandemError* e) { return table_.require_same(handle_, what, value.c_str(), e); });
  }
  void barrier() {
    run([&](TandemError* e) { return table_.barrier(handle_, e); });
  }
  void all_reduce(void* data, int64_t elements, TandemDType dtype, TandemOp op, bool encoded) {
    run([&](TandemError* e) {
      return table_.all_reduce(handle_, data, elements, dtype, op, encoded, e);
    });
  }
  void reduce_scatter(void* data, void* shard, int64_t rows, int64_t columns, TandemDType dtype,
                      TandemOp op, bool encoded) {
    run([&](TandemError* e) {
      return table_.reduce_scatter(handle_, data, shard, rows, columns, dtype, op, encoded, e);
    });
  }
  void all_gather(const void* shard, void* out, int64_t rows, int64_t row_bytes) {
    run([&](TandemError* e) { return table_.all_gather(handle_, shard, out, rows, row_bytes, e); });
  }
  void all_to_all(const void* send, const std::vector<int64_t>& send_counts, void* recv,
                  const std::vector<int64_t>& recv_counts, int64_t row_bytes) {
    run([&](TandemError* e) {
      return table_.all_to_all(handle_, send, send_counts.data(), recv, recv_counts.data(),
                               row_bytes, e);
    });
  }
  void broadcast(void* data, uint64_t bytes, int root) {
    run([&](TandemError* e) { return table_.broadcast(handle_, data, bytes, root, e); });
  }
  void post(const TandemMessage& message) {
    run([&](TandemError* e) { return table_.post(handle_, &message, e); });
  }

  /// Rows of shard_of(rows, size, rank), for every rank.
  std::vector<int64_t> shards(int64_t rows) const {
    std::vector<int64_t> counts(size_t(size_), rows / size_);
    for (int64_t rank = 0; rank < rows % size_; ++rank) ++counts[size_t(rank)];
    return counts;
  }

 private:
  template <typename Call>
  void run(const Call& call) {
    TandemError error;
    if (call(&error)) return;
    // A rank that comes later must not find the others' messages and take its call for complete.
    if (error.kind == kTandemTimeout) abort(error.text);
    throw_error(error, note_);
  }
  void name_ranks(const std::vector<int64_t>& ranks) {
    bool is_world = true;
    for (size_t i = 0; i < ranks.size(); ++i) is_world &= ranks[i] == int64_t(i);
    if (is_world) return;
    for (const int64_t rank : ranks) note_ += (note_.empty() ? "" : ", ") + std::to_string(rank);
    note_ = " (ranks of this group, from 0: " + note_ + ")";
  }

  const TandemTable& table_;
  TandemWorld* handle_ = nullptr;
  const int rank_, size_;
  const bool is_encoded_;
  std::string note_;
};

}  // namespace tandem_c10d
