// The gather under AG+GEMM and the weight gradient, on GPUs of one node: the copy engine pushes
// this rank's shard to the others in ring order, one transfer and one signal each, on a separate
// stream. The symmetric buffer that receives the shards is written again only after every rank is
// ready for the next call. Nothing waits on the host; a captured graph can be replayed.
//
// A kernel may send the shards itself instead (shard_route.h), with separate signals and epoch, in
// the same buffer; calls of any kind may follow each other.
#pragma once

#include <memory>
#include <vector>

#include "comm/device/gpu_communicator.h"
#include "comm/device/signal_kernels.h"
#include "core/cuda/common_stream.h"
#include "overlap/gather/cuda/shard_route.h"
#include "schedule/ring.h"
#include "tandem/collectives.h"
#include "tandem/tensor.h"

namespace tandem::gpu {

/// Stream on which ranks wait until the others are ready for a call.
enum class Entering {
  concurrent,  ///< the pushing stream: the local shard's GEMM starts at once, and the reader
               ///< advances its epoch itself, by `await`
  before,  ///< the communicator's stream: a kernel that fills the GPU cannot then start before the
           ///< one that it waits for
};

class ShardPushes {
 public:
  /// Collective. The gathered matrix is [rows, columns], split by shard_of(). With `keep_local`,
  /// the local rows are copied into it too, after the pushes. With `row_scales` a scale per row is
  /// sent with its shard, and every call must be given the local ones.
  ShardPushes(GpuCommunicator& comm, OpId op, int64_t rows, int64_t columns, DType dtype,
              bool keep_local, bool row_scales = false);

  /// Begins a call of more than one rank. `end` must follow.
  void begin(const Tensor& x, Entering entering, const Tensor* scales = nullptr) {
    start(x, scales, entering, keep_local_);
  }
  /// Makes the communicator's stream wait until the pushes have read their source.
  void end();

  /// Runs a whole call, by shards: enqueues `body(source, rows, data)` for the rows of rank
  /// `source`, stored at `data`, in ring order: the local ones, in place, then each remote shard
  /// once it has arrived.
  template <typename Body>
  void for_each_shard(const Tensor& x, const Tensor* scales, const Body& body) {
    const int ranks = comm_.size();
    if (ranks > 1) begin(x, Entering::concurrent, scales);
    body(comm_.rank(), local_, x.data());
    for (int step = 1; step < ranks; ++step) {
      const int source = schedule::ag_source(comm_.rank(), ranks, step);
      const Shard shard = shard_of(rows_, ranks, source);
      await(source, step == 1);
      body(source, shard, rows(comm_.rank(), shard.begin));
    }
    if (ranks > 1) end();
  }

  /// Run the whole gather serially: by NCCL, by the copy engine, or by kernels
  /// (collectives/cuda/shard_exchange.h). Return the address of the gathered matrix.
  const void* gather_by_nccl(const Tensor& x, const Tensor* scales = nullptr);
  const void* gather_by_copies(const Tensor& x, const Tensor* scales = nullptr);
  const void* gather_by_kernels(const Tensor& x, const Tensor* scales = nullptr);
  /// One rank: gathers x itself.
  void keep_alone(const Tensor& x);

  Shard local() const { return local_; }
  /// Rows starting at `row`, in the memory of rank `at`.
  std::byte* rows(int at, int64_t row) const;
  float* row_scales(int at, int64_t row) const;
  Tensor gathered() const;

  /// Records begin and end of each transfer of later calls, in the order of `target`; null stops
  /// it.
  void time(std::vector<Event>* times) { times_ = times; }
  bool is_timed() const { return times_ != nullptr; }
  /// Destination of transfer `step` of a call.
  int target(int step) const { return schedule::ag_target(comm_.rank(), comm_.size(), step + 1); }

  /// For kernels that wait themselves, after `begin` with Entering::before.
  ShardArrivals arrivals() const;
  /// For kernels that send `x` themselves; `route_arrivals` is for their readers. No other method
  /// may be called for such a call.
  ShardRoute route(const Tensor& x, const Tensor* scales) const;
  /// For the shorter shards; those with one row more count one more.
  ShardArrivals route_arrivals() const;

 private:
  void start(const Tensor& x, const Tensor* scales, Entering entering, bool keep_local);
  void push(const Tensor& x, const Tensor* scales, int step);
  void copy_local(const Tensor& x, const Tensor* scales, cudaStream_t stream);
  // Gathers x, and its scales, by `gather(shard, whole)`.
  template <typename Gather>
  const void* gather_by(const Tensor& x, const Tensor* scales, const Gather& gather);
  // Makes the communicator's stream wait until the shard of rank `source`, or of every other rank,
  // has arrived. `first`: the first wait of this call.
  void await(int source, bool first);
  // In device memory, initially zero.
  struct Words {
    // Epochs of the pushing and of the compute stream; values sent as signals to ready peers.
    uint64_t pushed, awaited, signal_value[kMaxGpus];
    CallCounter routes;  // calls of kernels that send x themselves
  };
  Words& words() const { return *reinterpret_cast<Words*>(words_.data()); }
  int row_bytes() const { return int(columns_ * int64_t(size_of(dtype_))); }
  // Extends the deadline of waits that depend on other ranks' waits, so that those report the rank
  // that is really missing.
  Deadline extend_deadline() const { return gpu::extend_deadline(comm_.device_deadline()); }

  GpuCommunicator& comm_;
  OpId op_;
  int64_t rows_, columns_;
  DType dtype_;
  bool keep_local_, row_scales_;
  Shard local_;
  size_t scales_at_;  // in the buffer: bytes of its rows, rounded up
  std::shared_ptr<GpuBuffer> buffer_;
  DeviceMemory words_;
  CommonStream side_{Common::side};
  PacedCopies paced_;
  Event begun_, pushed_;
  std::vector<Event>* times_ = nullptr;
};

}  // namespace tandem::gpu
