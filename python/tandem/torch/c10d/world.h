// Ranks of a process group: tandem's functions (table.h) with exceptions of PyTorch.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "table.h"

namespace tandem_c10d {

struct GroupArguments {
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

/// Gathers `bytes` bytes of every rank into `all`, by rank. Throws.
using Gather = std::function<void(const void* local, uint64_t bytes, void* all)>;

/// Gather for TandemWorldArguments. Exceptions do not leave C functions: keeps them.
struct GatherCall {
  const Gather& gather;
  std::exception_ptr failure;

  static bool call(void* self, const void* local, uint64_t bytes, void* all) {
    auto& called = *static_cast<GatherCall*>(self);
    try {
      called.gather(local, bytes, all);
      return true;
    } catch (...) {
      called.failure = std::current_exception();
      return false;
    }
  }
};

/// Stream of the calls of GPU ranks: a cudaStream_t of the GPU that is current.
struct CudaStream {
  void* raw;
};

/// Calls come from one thread at a time, except `abort`, `bytes_sent` and `post`.
class World {
 public:
  /// GPU ranks if there is a stream.
  World(const TandemTable& table, const GroupArguments& arguments, const Gather& gather,
        std::optional<CudaStream> stream = {})
      : table_(table),
        rank_(arguments.rank),
        size_(arguments.size),
        is_encoded_(!arguments.wire.empty()),
        on_gpu_(stream) {
    GatherCall call{gather, nullptr};
    const TandemWorldArguments passed{.rank = rank_,
                                      .size = size_,
                                      .deadline_s = arguments.deadline_s,
                                      .wire = arguments.wire.c_str(),
                                      .allow_uncompressed = arguments.allow_uncompressed,
                                      .gather = &GatherCall::call,
                                      .context = &call,
                                      .on_gpu = on_gpu_,
                                      .stream = stream ? stream->raw : nullptr};
    TandemError error;
    handle_ = table.connect(&passed, &error);
    if (!handle_ && call.failure) std::rethrow_exception(call.failure);
    if (!handle_) throw_error(error);
    name_ranks(arguments.global_ranks);
  }
  ~World() { table_.close(handle_); }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool is_encoded() const { return is_encoded_; }
  bool on_gpu() const { return on_gpu_; }
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
  void exchange(const std::vector<TandemGpuMessage>& messages) {
    run([&](TandemError* e) {
      return table_.exchange(handle_, messages.data(), int(messages.size()), e);
    });
  }
  void check() {
    run([&](TandemError* e) { return table_.check(handle_, e); });
  }
  void synchronize() {
    run([&](TandemError* e) { return table_.synchronize(handle_, e); });
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
  const bool is_encoded_, on_gpu_;
  std::string note_;
};

}  // namespace tandem_c10d
