#include "overlap/moe/cuda/expert_rows.h"

#include <algorithm>
#include <string>

#include "core/cuda/check.h"
#include "core/cuda/concurrent.cuh"
#include "core/cuda/element.cuh"
#include "core/cuda/load_module.cuh"
#include "core/cuda/share.h"
#include "overlap/moe/cuda/gather_rows.cuh"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

// One warp per row.
constexpr int kThreads = 256, kRowsOfBlock = kThreads / 32, kBlocksPerSm = 4;

/// `body` is called with a row's index and a lane.
template <class Body>
__device__ void for_each_row(const SortedRows& rows, Body&& body) {
  const int all = __ldg(&rows.group_rows[rows.groups].first);
  const int lane = int(threadIdx.x) % 32;
  for (int row = int(blockIdx.x) * kRowsOfBlock + int(threadIdx.x) / 32; row < all;
       row += int(gridDim.x) * kRowsOfBlock) {
    body(row, lane);
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    gather_kernel(SortedRows rows, MoeGather p, int64_t vecs) {
  if (p.arrivals.arrived) {
    if (threadIdx.x < 32) await_sources(p.arrivals, 0, p.arrivals.ranks - 1, int(threadIdx.x));
    __syncthreads();
  }
  for_each_row(rows,
               [&](int row, int lane) { move_row(p, __ldg(p.source + row), row, lane, vecs); });
}

__global__ void __launch_bounds__(kOverlappedThreads)
    overlapped_gather_kernel(RowSlots slots, MoeGather p, int64_t vecs) {
  allow_kernel_behind();
  gather_slots(slots, p, vecs);
}

__device__ float sigmoid(float value) {
  return __fdividef(1.f, 1.f + __expf(-value));
}
/// silu; strongly negative values give 0, as the quotient does if e^-x overflows.
__device__ float silu(float value) {
  return __fdividef(value, 1.f + __expf(-value));
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    swiglu_kernel(SortedRows rows, const Vec<T>* gate_up, Vec<T>* inner, int64_t vecs) {
  for_each_row(rows, [&](int row, int lane) {
    const Vec<T>* const gate = gate_up + row * 2 * vecs;
    for (int64_t i = lane; i < vecs; i += 32) {
      const Vec<T> g = gate[i], u = gate[vecs + i];
      Vec<T> result;
#pragma unroll
      for (int e = 0; e < Vec<T>::kElements; ++e) {
        result.at[e] = from_float<T>(silu(to_float(g.at[e])) * to_float(u.at[e]));
      }
      inner[row * vecs + i] = result;
    }
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    gate_backward_kernel(SortedRows rows, MoeGateBackward p, int64_t vecs) {
  const auto* const gate_up = static_cast<const Vec<T>*>(p.gate_up);
  const auto* const d_act = static_cast<const Vec<T>*>(p.d_act);
  auto* const scaled = static_cast<Vec<T>*>(p.scaled);
  auto* const dgate_up = static_cast<Vec<T>*>(p.dgate_up);
  for_each_row(rows, [&](int row, int lane) {
    const int routing_idx = __ldg(p.routing_idx + row);
    const float weight = routing_idx >= 0 ? __ldg(p.weights + routing_idx) : 0.f;
    float dot = 0;
#pragma unroll 2
    for (int64_t i = lane; i < vecs; i += 32) {
      Vec<T> g = gate_up[row * 2 * vecs + i], u = gate_up[(row * 2 + 1) * vecs + i];
      Vec<T> d = d_act[row * vecs + i], s;
#pragma unroll
      for (int e = 0; e < Vec<T>::kElements; ++e) {
        const float gate = to_float(g.at[e]), up = to_float(u.at[e]), dvalue = to_float(d.at[e]);
        const float gate_sigmoid = sigmoid(gate), activated = gate * gate_sigmoid,
                    inner = activated * up;
        const float of_inner = weight * dvalue;
        dot = fmaf(dvalue, inner, dot);
        s.at[e] = from_float<T>(weight * inner);
        g.at[e] = from_float<T>(of_inner * up * fmaf(activated, 1.f - gate_sigmoid, gate_sigmoid));
        u.at[e] = from_float<T>(of_inner * activated);
      }
      scaled[row * vecs + i] = routing_idx >= 0 ? s : Vec<T>{};
      dgate_up[row * 2 * vecs + i] = routing_idx >= 0 ? g : Vec<T>{};
      dgate_up[(row * 2 + 1) * vecs + i] = routing_idx >= 0 ? u : Vec<T>{};
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) dot += __shfl_xor_sync(~0u, dot, apart);
    if (lane == 0 && routing_idx >= 0) p.d_gate_weight[routing_idx] = dot;
  });
}

unsigned blocks_of(const SortedRows& rows) {
  const int64_t blocks = (rows.padded_rows + kRowsOfBlock - 1) / kRowsOfBlock;
  return unsigned(
      std::clamp<int64_t>(blocks, 1, this_share()->blocks(132 * kBlocksPerSm, kBlocksPerSm)));
}

template <typename Body>
void with_row_type(const SortedRows& rows, const Body& body) {
  if (rows.dtype == DType::bf16) return body(__nv_bfloat16{});
  if (rows.dtype == DType::f16) return body(__half{});
  throw InvalidArgument("sorted rows of experts: dtype " + std::string(name_of(rows.dtype)) +
                        ": expected bf16 or f16");
}

}  // namespace

void launch_gather(const SortedRows& rows, const MoeGather& gather, cudaStream_t stream) {
  if (rows.padded_rows == 0) return;
  gather_kernel<<<blocks_of(rows), kThreads, 0, stream>>>(rows, gather, gather.columns / 8);
  check_launch("gather_kernel");
}

void launch_overlapped_gather(const GroupedTable& table, const MoeGather& gather, uint32_t* ready,
                              const ConcurrentBlocks& blocks, cudaStream_t stream) {
  launch_blocks(overlapped_gather_kernel, blocks, kOverlappedThreads, "overlapped_gather_kernel",
                stream, RowSlots::of(table, ready), gather, gather.columns / 8);
}

void launch_sorted_swiglu(const SortedRows& rows, const void* gate_up, void* inner, int64_t ffn,
                          cudaStream_t stream) {
  if (rows.padded_rows == 0) return;
  with_row_type(rows, [&]<typename T>(T) {
    swiglu_kernel<T><<<blocks_of(rows), kThreads, 0, stream>>>(
        rows, static_cast<const Vec<T>*>(gate_up), static_cast<Vec<T>*>(inner),
        ffn / Vec<T>::kElements);
  });
  check_launch("swiglu_kernel");
}

void launch_gate_backward(const SortedRows& rows, const MoeGateBackward& params,
                          cudaStream_t stream) {
  if (rows.padded_rows == 0) return;
  with_row_type(rows, [&]<typename T>(T) {
    gate_backward_kernel<T>
        <<<blocks_of(rows), kThreads, 0, stream>>>(rows, params, params.ffn / Vec<T>::kElements);
  });
  check_launch("gate_backward_kernel");
}

}  // namespace tandem::gpu
