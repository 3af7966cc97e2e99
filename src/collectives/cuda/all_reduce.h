// All-reduce of small and medium tensors by kernels that store directly into the peers' memory.
//
// one_shot: every rank sends its whole tensor to every other and sums all of it: one exchange.
// two_shot: every rank sums the shard it owns and sends the result: two exchanges, a fraction of
// the bytes. pipelined: the same in chunks, the first of which are returned while later ones are
// sent (shard_exchange.h). nccl: the NCCL call.
//
// Block b of every rank handles slice b, so blocks synchronize without a grid-wide barrier. Staging
// memory alternates with the epoch's parity: a rank sends in call e + 2 only after it has seen
// every peer in call e + 1, by which time the peer's call e had ended.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "collectives/cuda/exchange.h"
#include "comm/device/gpu_communicator.h"
#include "tandem/norm.h"
#include "tandem/tensor.h"

namespace tandem::gpu {

enum class AllReduceAlgorithm { one_shot, two_shot, pipelined, nccl };
std::string_view name_of(AllReduceAlgorithm algorithm);

class AllReduce {
 public:
  enum class Sizes { up_to_it, this_one };
  /// Collective. Supports f32, bf16 or f16 tensors of up to `max_elements`, or of exactly that
  /// size; `row`: elements of a row if an AddNorm will follow; `op`: name in a Timeout.
  AllReduce(GpuCommunicator& comm, int64_t max_elements, DType dtype, int64_t row = 0,
            OpId op = OpId::all_reduce, Sizes sizes = Sizes::up_to_it);
  /// out = sum over ranks of in, in rank order with f32 accumulation (nccl: in its own order). in
  /// may be out. Enqueued on the communicator's stream. Throws InvalidArgument if there are too
  /// many elements or, except for pipelined and nccl, not a multiple of 16 bytes.
  void run(const Tensor& in, const Tensor& out, AllReduceAlgorithm algorithm);
  /// Sums matrices, then applies AddNorm to the sum: in the same kernel, or for nccl in a second
  /// one. in may be out; rows are multiples of 16 bytes.
  void run(const Tensor& in, const Tensor& out, AllReduceAlgorithm algorithm,
           const AddNorm& add_norm);
  /// True if `algorithm` supports tensors of this many elements (with an AddNorm: in rows of
  /// `row`).
  bool fits(int64_t elements, AllReduceAlgorithm algorithm, int64_t row = 0) const;
  /// Fastest of one_shot and two_shot for this many bytes on NVLink; nccl if neither has enough
  /// staging memory.
  AllReduceAlgorithm choose(int64_t elements) const;

 private:
  int64_t shard_bytes(int64_t elements, int64_t row) const;
  void check_tensors(const Tensor& in, const Tensor& out, AllReduceAlgorithm algorithm,
                     int64_t row) const;
  ExchangeParams make_params(const Tensor& in, const Tensor& out) const;

  GpuCommunicator& comm_;
  int64_t capacity_;    // bytes of one tensor
  int64_t slot_bytes_;  // bytes of one rank's share of it
  DType dtype_;
  OpId op_;
  std::shared_ptr<GpuBuffer> staging_;
  DeviceMemory calls_;  // a CallCounter
};

}  // namespace tandem::gpu
