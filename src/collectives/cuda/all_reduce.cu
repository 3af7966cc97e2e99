#include "collectives/cuda/all_reduce.h"

#include <algorithm>

#include "comm/nccl/device_signal.cuh"
#include "kernels/cuda/element.cuh"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 512;
constexpr int kMaxBlocks = 64;
// One exchange of everything beats two of a part up to about here.
constexpr int64_t kOneShotBytes = int64_t(1) << 20;
// Above this the wire takes so long that kernels gain nothing over NCCL.
constexpr int64_t kKernelBytes = int64_t(32) << 20;

struct Job {
  PeerTable table;
  Watch watch;
  const void* in;
  void* out;
  int64_t packs;      // 16-byte packs of the tensor
  size_t slot_bytes;  // one rank's slot
  uint64_t* epoch;
  unsigned* ended;
};

// Signals: [exchange][source][block].
__device__ uint64_t* flag(const Job& job, int at, int exchange, int source) {
  return job.table.signals[at] + (exchange * kMaxGpus + source) * kMaxBlocks + blockIdx.x;
}

__device__ void exchange_flags(const Job& job, int exchange, uint64_t epoch) {
  __syncthreads();
  const int peer = int(threadIdx.x);
  if (peer < job.table.size && peer != job.table.rank) {
    release_signal(flag(job, peer, exchange, job.table.rank), epoch);
    wait_signal(flag(job, job.table.rank, exchange, peer), epoch, job.watch, OpId::all_reduce, peer,
                blockIdx.x);
  }
  __syncthreads();
}

// The last block to end advances the epoch: all others have read it.
__device__ void end_call(const Job& job, uint64_t epoch) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(job.ended, 1u) == gridDim.x - 1) {
    *job.ended = 0;
    *job.epoch = epoch;
  }
}

template <typename T>
__device__ Pack<T>* slot(const Job& job, int at, int index) {
  return reinterpret_cast<Pack<T>*>(job.table.memory[at] + size_t(index) * job.slot_bytes);
}

template <typename T>
__device__ Pack<T> load_pack(const Pack<T>* from) {
  const uint4 words = load_fresh(reinterpret_cast<const uint4*>(from));
  return reinterpret_cast<const Pack<T>&>(words);
}

template <typename T>
__device__ Pack<T> sum_slots(const Job& job, const Pack<T>& mine, int first_slot, int64_t i) {
  float sum[Pack<T>::kElements] = {};
  Pack<T> parts[kMaxGpus];
#pragma unroll
  for (int r = 0; r < kMaxGpus; ++r) {
    if (r < job.table.size && r != job.table.rank) {
      parts[r] = load_pack(slot<T>(job, job.table.rank, first_slot + r) + i);
    }
  }
#pragma unroll
  for (int r = 0; r < kMaxGpus; ++r) {
    if (r >= job.table.size) break;
    const Pack<T>& part = r == job.table.rank ? mine : parts[r];
    for (int e = 0; e < Pack<T>::kElements; ++e) sum[e] += to_float(part.at[e]);
  }
  Pack<T> result;
  for (int e = 0; e < Pack<T>::kElements; ++e) result.at[e] = from_float<T>(sum[e]);
  return result;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) one_shot_kernel(Job job) {
  const uint64_t epoch = *reinterpret_cast<volatile uint64_t*>(job.epoch) + 1;
  const int first = int(epoch % 2) * 2 * job.table.size;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  const int64_t begin = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const auto* in = static_cast<const Pack<T>*>(job.in);
  auto* out = static_cast<Pack<T>*>(job.out);
  for (int64_t i = begin; i < job.packs; i += step) {
    const Pack<T> mine = in[i];
    for (int s = 1; s < job.table.size; ++s) {
      const int peer = (job.table.rank + s) % job.table.size;
      slot<T>(job, peer, first + job.table.rank)[i] = mine;
    }
  }
  exchange_flags(job, 0, epoch);
  for (int64_t i = begin; i < job.packs; i += step) out[i] = sum_slots<T>(job, in[i], first, i);
  end_call(job, epoch);
}

// Part p of the tensor is packs [p * part, (p + 1) * part); block b sums slice b of its rank's
// part.
template <typename T>
__global__ void __launch_bounds__(kThreads) two_shot_kernel(Job job) {
  const uint64_t epoch = *reinterpret_cast<volatile uint64_t*>(job.epoch) + 1;
  const int first = int(epoch % 2) * 2 * job.table.size, second = first + job.table.size;
  const int size = job.table.size, rank = job.table.rank;
  const int64_t part = (job.packs + size - 1) / size;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  const int64_t begin = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const auto* in = static_cast<const Pack<T>*>(job.in);
  auto* out = static_cast<Pack<T>*>(job.out);
  for (int s = 1; s < size; ++s) {
    const int owner = (rank + s) % size;
    const int64_t count = min(part, job.packs - owner * part);
    for (int64_t i = begin; i < count; i += step) {
      slot<T>(job, owner, first + rank)[i] = in[owner * part + i];
    }
  }
  exchange_flags(job, 0, epoch);
  const int64_t mine = min(part, job.packs - rank * part);
  for (int64_t i = begin; i < mine; i += step) {
    const Pack<T> sum = sum_slots<T>(job, in[rank * part + i], first, i);
    out[rank * part + i] = sum;
    for (int s = 1; s < size; ++s) slot<T>(job, (rank + s) % size, second + rank)[i] = sum;
  }
  exchange_flags(job, 1, epoch);
  for (int s = 1; s < size; ++s) {
    const int owner = (rank + s) % size;
    const int64_t count = min(part, job.packs - owner * part);
    for (int64_t i = begin; i < count; i += step) {
      out[owner * part + i] = load_pack(slot<T>(job, rank, second + owner) + i);
    }
  }
  end_call(job, epoch);
}

ncclDataType_t nccl_type(DType dtype) {
  return dtype == DType::f32 ? ncclFloat32 : dtype == DType::f16 ? ncclFloat16 : ncclBfloat16;
}

}  // namespace

std::string_view name_of(AllReduceWay way) {
  switch (way) {
    case AllReduceWay::one_shot:
      return "one_shot";
    case AllReduceWay::two_shot:
      return "two_shot";
    case AllReduceWay::nccl:
      return "nccl";
  }
  return "?";
}

AllReduce::AllReduce(NcclCommunicator& comm, int64_t max_elements, DType dtype)
    : comm_(comm), dtype_(dtype), counters_(2 * sizeof(uint64_t)) {
  if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f16) {
    throw InvalidArgument(std::string("all_reduce: dtype ") + std::string(tandem::name_of(dtype)) +
                          ": expected f32, bf16 or f16");
  }
  const int64_t bytes = max_elements * int64_t(size_of(dtype));
  capacity_ = (std::min(bytes, kKernelBytes) + 127) / 128 * 128;
  // Two parities of one slot a rank for what arrives and as many for results.
  slot_bytes_ =
      std::max((capacity_ / comm.size() + 255) / 128 * 128, std::min(capacity_, kOneShotBytes));
  staging_ = std::static_pointer_cast<NcclBuffer>(
      comm.allocate(size_t(slot_bytes_) * size_t(4 * comm.size()), 2 * kMaxGpus * kMaxBlocks));
}

bool AllReduce::fits(int64_t elements, AllReduceWay way) const {
  const int64_t bytes = elements * int64_t(size_of(dtype_));
  if (way == AllReduceWay::nccl) return true;
  return bytes % 16 == 0 && bytes <= (way == AllReduceWay::one_shot ? slot_bytes_ : capacity_);
}

AllReduceWay AllReduce::choose(int64_t elements) const {
  const int64_t bytes = elements * int64_t(size_of(dtype_));
  if (bytes > capacity_) return AllReduceWay::nccl;
  return bytes <= std::min(int64_t(512) << 10, slot_bytes_) ? AllReduceWay::one_shot
                                                            : AllReduceWay::two_shot;
}

void AllReduce::run(const Tensor& in, const Tensor& out, AllReduceWay way) {
  const int64_t bytes = int64_t(in.bytes());
  if (in.dtype() != dtype_ || out.dtype() != dtype_ || in.elements() != out.elements()) {
    throw InvalidArgument("all_reduce: " + in.describe() + " to " + out.describe() +
                          ": expected equal sizes of dtype " +
                          std::string(tandem::name_of(dtype_)));
  }
  if (bytes == 0) return;
  if (way == AllReduceWay::nccl || comm_.size() == 1) {
    check(ncclAllReduce(in.data(), out.data(), size_t(in.elements()), nccl_type(dtype_), ncclSum,
                        comm_.nccl(), comm_.stream()),
          "ncclAllReduce");
    return;
  }
  if (!fits(in.elements(), way)) {
    throw InvalidArgument(
        "all_reduce: " + in.describe() + ": expected a multiple of 16 bytes, at most " +
        std::to_string(capacity_) + " (one_shot: " + std::to_string(slot_bytes_) + ")");
  }
  auto* epoch = reinterpret_cast<uint64_t*>(counters_.data());
  const Job job{
      staging_->table(), comm_.watch(),       in.data(), out.data(),
      bytes / 16,        size_t(slot_bytes_), epoch,     reinterpret_cast<unsigned*>(epoch + 1)};
  const int64_t per_block = way == AllReduceWay::one_shot ? kThreads : kThreads * comm_.size();
  const int blocks =
      int(std::clamp<int64_t>((bytes / 16 + per_block - 1) / per_block, 1, kMaxBlocks));
  with_float_type(dtype_, [&]<typename T>(T) {
    if (way == AllReduceWay::one_shot) {
      one_shot_kernel<T><<<blocks, kThreads, 0, comm_.stream()>>>(job);
    } else {
      two_shot_kernel<T><<<blocks, kThreads, 0, comm_.stream()>>>(job);
    }
  });
  check_launch("all_reduce");
}

}  // namespace tandem::gpu
