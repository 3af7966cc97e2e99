// The gather under AG+GEMM and the weight gradient, on GPUs of one node: the copy engine pushes
// this rank's shard to the others in ring order, one transfer and one signal each, on a stream of
// its own. Shards cross into a symmetric buffer that is written again only after every rank has
// entered the next call. Nothing waits on the host; a captured graph can be replayed.
//
// A kernel may carry the shards itself instead (shard_route.h), with signals and an epoch of its
// own, in the same buffer; calls of any kind may follow each other.
#pragma once

#include <memory>
#include <vector>

#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/signal_kernels.h"
#include "overlap/cuda/shard_route.h"
#include "overlap/cuda/ways.h"
#include "tandem/collectives.h"
#include "tandem/tensor.h"

namespace tandem::gpu {

/// Where ranks wait for each other to have entered a call.
enum class Entering {
  beside,  ///< on the pushing stream: the own shard's product starts at once, and the reader counts
           ///< its epochs itself, by `await`
  before,  ///< on the communicator's stream: a kernel that fills the GPU cannot then start before
           ///< the one that it waits for
};

class ShardPushes {
 public:
  /// Collective. The gathered matrix is [rows, columns], split by shard_of(). With `keep_own`, the
  /// own rows are copied into it too, behind the pushes. With `row_scales` a scale of each row
  /// travels right behind its shard, and every call must be given the own ones.
  ShardPushes(NcclCommunicator& comm, OpId op, int64_t rows, int64_t columns, DType dtype,
              bool keep_own, bool row_scales = false);

  /// Begins a call of more than one rank. `end` must follow.
  void begin(const Tensor& x, Entering entering, const Tensor* scales = nullptr) {
    start(x, scales, entering, keep_own_);
  }
  /// The communicator's stream goes on once the shard of rank `source` is here. `first`: the first
  /// wait of this call.
  void await(int source, bool first);
  /// The communicator's stream goes on once the pushes have read their source.
  void end();

  /// The whole gather by a serial way or `plain`; returns where the gathered matrix is.
  const void* gather(Way way, const Tensor& x, const Tensor* scales = nullptr);
  /// One rank: x is all there is.
  void keep_alone(const Tensor& x);

  Shard mine() const { return mine_; }
  /// Rows from `row` on, in the memory of rank `at`.
  std::byte* rows(int at, int64_t row) const;
  float* row_scales(int at, int64_t row) const;
  Tensor gathered() const;

  /// Begin and end of each transfer of the calls from now on, in the order of `target`; null: no
  /// more.
  void time(std::vector<Event>* times) { times_ = times; }
  bool is_timed() const { return times_ != nullptr; }
  /// Whom the transfer number `step` of a call goes to.
  int target(int step) const { return (comm_.rank() + comm_.size() - 1 - step) % comm_.size(); }

  /// For kernels that wait themselves, after `begin` with Entering::before.
  ShardGate gate() const;
  /// For kernels that carry `x` themselves, and what their readers wait for. Nothing else of this
  /// class is called for such a call.
  ShardRoute route(const Tensor& x) const;
  ShardGate route_gate() const;

 private:
  void start(const Tensor& x, const Tensor* scales, Entering entering, bool keep_own);
  void push(const Tensor& x, const Tensor* scales, int step);
  void copy_own(const Tensor& x, const Tensor* scales, cudaStream_t stream);
  uint64_t* epoch_of_pushes() const { return reinterpret_cast<uint64_t*>(epochs_.data()); }
  uint64_t* epoch_of_waits() const { return epoch_of_pushes() + 1; }
  uint64_t* epoch_of_routes() const { return epoch_of_pushes() + 2; }
  int row_bytes() const { return int(columns_ * int64_t(size_of(dtype_))); }
  // What depends on others' waits gives up after them: those name who is really missing.
  Watch patient() const { return gpu::patient(comm_.watch()); }

  NcclCommunicator& comm_;
  OpId op_;
  int64_t rows_, columns_;
  DType dtype_;
  bool keep_own_, row_scales_;
  Shard mine_;
  size_t scales_at_;  // in the buffer: bytes of its rows, rounded up
  std::shared_ptr<NcclBuffer> buffer_;
  // Of the pushing and of the multiplying stream, and of kernels' routes with a count of theirs.
  DeviceMemory epochs_;
  Stream side_{Priority::high};
  Event begun_, pushed_;
  std::vector<Event>* times_ = nullptr;
};

}  // namespace tandem::gpu
