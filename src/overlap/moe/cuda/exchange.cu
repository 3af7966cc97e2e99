#include "overlap/moe/cuda/exchange.cuh"

#include <string>

#include "core/cuda/check.h"
#include "core/cuda/concurrent.cuh"
#include "core/cuda/element.cuh"
#include "core/cuda/load_module.cuh"
#include "overlap/moe/cuda/gather_rows.cuh"
#include "overlap/moe/cuda/weighted_sum.cuh"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256, kSendingThreads = 1024, kSummingThreads = 512;
constexpr int kSentVecs = 4, kSummedVecs = 2;  // in flight per lane
constexpr int kVecsAtATime = 8;                // per lane
constexpr int kManyRows = 512;  // at least so many rows: a warp sums a row, not a block

/// The expert id of a row's choice, or -1 if it is invalid.
__device__ int checked_expert(const MoeCall& call, int64_t row, int routing_idx, float weight) {
  const int32_t* experts = call.experts + row * call.space.top_k;
  const int expert = experts[routing_idx];
  bool right = expert >= 0 && expert < call.grid.experts && isfinite(weight);
  for (int other = 0; other < routing_idx; ++other) right = right && experts[other] != expert;
  return right ? expert : -1;
}

/// Called by all threads once all ranks' expert ids have arrived: whether all ranks are in this
/// call.
__device__ bool all_in(const MoeCall& call, uint64_t tag, uint64_t epoch) {
  const int peer = int(threadIdx.x), rank = call.table.rank;
  bool same = true;
  if (peer < call.table.size && peer != rank) {
    const uint64_t there = *at<const volatile uint64_t>(call, rank, call.space.tag_at(peer));
    same = there == tag;
    if (!same) {
      report_failure(ErrorRecord::kMismatch, call.deadline, OpId::all_to_all, peer, -1, tag, there);
      give_up(&call.state->calls, epoch);
    }
  }
  return __syncthreads_and(same);
}

// One warp per row.
template <bool kPaced>
__global__ void __launch_bounds__(kThreads) notify_kernel(MoeCall call) {
  __shared__ unsigned leaving;
  if (threadIdx.x == 0) leaving = 0;
  __syncthreads();
  const int rank = call.table.rank, world = call.table.size, top_k = call.space.top_k;
  const uint64_t epoch = this_epoch(&call.state->calls);
  const bool sends = !gave_up_before(&call.state->calls, epoch);
  for (int64_t row = warp_of_grid(); row < call.space.tokens; row += warps_of_grid()) {
    const bool there = row < call.rows;
    unsigned token_in_rank = 0;
    int dropped = 0;
    for (int i = lane(); i < top_k; i += 32) {
      const float weight = there ? call.weights[row * top_k + i] : 0;
      const int expert = there ? checked_expert(call, row, i, weight) : -1;
      if (expert >= 0) {
        token_in_rank |= ((1u << call.grid.tp) - 1) << call.grid.holder(expert);
      } else if (there) {
        dropped += !call.backward && call.experts[row * top_k + i] != -1;
      }
      if (call.saved_experts) {
        call.saved_experts[row * top_k + i] = expert;
        call.saved_weights[row * top_k + i] = expert < 0 ? 0 : weight;
      }
      for (int step = 0; step < world; ++step) {
        const int to = schedule::moe_target(rank, world, step);
        if (step > 0 && !sends) break;
        at<int32_t>(call, to, call.space.experts_at(rank))[row * top_k + i] = expert;
        at<float>(call, to, call.space.weights_at(rank))[row * top_k + i] = expert < 0 ? 0 : weight;
      }
    }
    __syncwarp();
    token_in_rank = __reduce_or_sync(~0u, token_in_rank);
    if (lane() == 0) {
      call.token_in_rank[row] = uint8_t(token_in_rank);
      atomicAdd(&leaving, unsigned(__popc(token_in_rank & ~(1u << rank))));
    }
    if (dropped > 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(call.dropped),
                static_cast<unsigned long long>(dropped));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&call.state->counted_rows, leaving);
  if (!is_last_block(&call.state->announced)) return;
  const int peer = int(threadIdx.x);
  if (peer == 0) {
    call.state->leaving_rows = atomicExch(&call.state->counted_rows, 0);
    if (call.saved_call && !call.backward) *call.saved_call = epoch;
  }
  const uint64_t tag =
      CallTag{call.backward, call.layer, call.backward ? *call.saved_call : 0}.pack();
  if constexpr (kPaced) {
    if (sends && peer == 0) pace(call.link_pacer, (world - 1) * call.space.routings() * 8);
    __syncthreads();
  }
  if (sends && peer < world && peer != rank) {
    *at<uint64_t>(call, peer, call.space.tag_at(rank)) = tag;
    release_signal(call.table.signals[peer] + MoeSpace::routings_signal(rank), epoch);
  }
  if (sends && await(call, MoeSpace::routings_signal(0), epoch, call.deadline) &&
      all_in(call, tag, epoch)) {
    if (peer == 0) call.state->agreed = epoch;
    return;
  }
  // Without valid expert ids of all ranks, nothing is computed.
  if (peer < world && peer != rank) {
    release_signal(call.table.signals[peer] + MoeSpace::abandoned_signal(rank), epoch);
  }
  const int64_t all = int64_t(world) * call.space.routings();
  for (int64_t i = peer; i < all; i += kThreads) {
    at<int32_t>(call, rank, call.space.experts_at(0))[i] = -1;
  }
}

/// Called by the first `blocks` of a grid; one warp per row or message.
template <bool kPaced>
__device__ void send_rows(const MoeCall& call, const uint4* x, int64_t vecs, bool encoded,
                          unsigned blocks) {
  const int rank = call.table.rank, world = call.table.size;
  const int warps = int(blocks) * kSendingThreads / 32;
  const uint64_t epoch = this_epoch(&call.state->calls);
  if (gave_up_before(&call.state->calls, epoch)) return;
  Outgoing<kPaced> outgoing(call.link_pacer);
  for (int step = 1; step < world; ++step) {
    const int to = schedule::moe_target(rank, world, step);
    uint4* const rows = at<uint4>(
        call, to, encoded ? call.space.row_messages_at(to, rank) : call.space.rows_at(to, rank));
    for (int64_t row = warp_of_grid(); row < call.rows; row += warps) {
      if ((call.token_in_rank[row] >> to & 1) == 0) continue;
      for (int64_t first = lane(); first < vecs; first += 32 * kVecsAtATime) {
        uint4 values[kVecsAtATime];
#pragma unroll
        for (int i = 0; i < kVecsAtATime; ++i) {
          if (first + 32 * i < vecs) values[i] = __ldg(x + row * vecs + first + 32 * i);
        }
#pragma unroll
        for (int i = 0; i < kVecsAtATime; ++i) {
          if (first + 32 * i < vecs) rows[row * vecs + first + 32 * i] = values[i];
        }
      }
      outgoing.add(vecs * int64_t(sizeof(uint4)));
    }
    outgoing.end_rank();
    if (is_last_block(&call.state->sent_rows[to], blocks) && threadIdx.x == 0) {
      outgoing.tell(call.table.signals[to] + MoeSpace::rows_signal(rank), epoch);
    }
  }
  outgoing.finish();
}

template <bool kPaced>
__global__ void __launch_bounds__(kSendingThreads)
    send_rows_kernel(MoeCall call, const uint4* x, int64_t vecs, bool encoded) {
  if (call.senders && threadIdx.x == 0) atomicAdd(call.senders, 1);
  send_rows<kPaced>(call, x, vecs, encoded, gridDim.x);
}

// The first `senders` blocks send before they sort.
template <bool kPaced>
__global__ void __launch_bounds__(kSendingThreads)
    send_and_gather_kernel(MoeCall call, const uint4* x, unsigned senders, RowSlots turns,
                           MoeGather gather, int64_t vecs) {
  allow_kernel_behind();
  if (blockIdx.x < senders) send_rows<kPaced>(call, x, vecs, false, senders);
  gather_slots(turns, gather, vecs);
}
static_assert(kSendingThreads == kOverlappedThreads);

/// `Elements` has an array `at` with one T per value.
template <typename T, typename Elements, int kElements>
__device__ Elements rounded(const float (&values)[kElements]) {
  Elements result;
#pragma unroll
  for (int e = 0; e < kElements; ++e) result.at[e] = from_float<T>(values[e]);
  return result;
}

/// Sends the weight gradients of the rows of rank `to`; returns how many this thread has sent.
__device__ unsigned send_d_gate_weight(const MoeCall& call, int to) {
  float* const d_gate_weight = at<float>(call, to, call.space.d_gate_weight_at(call.table.rank));
  const int64_t routings = call.space.routings(), first = to * routings;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  unsigned sent = 0;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < routings; i += step) {
    const bool computed_here = call.position[first + i] >= 0;
    if (computed_here) d_gate_weight[i] = call.d_gate_weight[first + i];
    sent += computed_here;
  }
  return sent;
}

/// Sums a local row's weight gradients over the ranks that share an expert, in rank order. Called
/// by all `threads` of the row; this one has index `thread`.
__device__ void sum_d_gate_weight(const MoeCall& call, int64_t row, int thread, int threads) {
  const int rank = call.table.rank, top_k = call.space.top_k;
  for (int i = thread; i < top_k; i += threads) {
    const int64_t routing_idx = row * top_k + i;
    const int expert = call.experts[routing_idx];
    float sum = 0;
    for (int column_group = 0; expert >= 0 && column_group < call.grid.tp; ++column_group) {
      const int from = call.grid.holder(expert) + column_group;
      sum += from == rank ? call.d_gate_weight[rank * call.space.routings() + routing_idx]
                          : *at<const volatile float>(
                                call, rank, call.space.d_gate_weight_at(from) + routing_idx * 4);
    }
    call.dweights[routing_idx] = sum;
  }
}

// One warp per row.
template <typename T, bool kPaced>
__global__ void __launch_bounds__(kSummingThreads)
    send_sums_kernel(MoeCall call, int64_t first, int64_t end, int column_group) {
  allow_kernel_behind();
  constexpr int kElements = Vec<T>::kElements;
  const int rank = call.table.rank, world = call.table.size, top_k = call.space.top_k;
  const int64_t vecs = call.space.hidden / kElements;
  if (has_given_up(call)) return;
  const uint64_t epoch = this_epoch(&call.state->calls);
  const auto* const results = static_cast<const Vec<T>*>(call.results);
  Outgoing<kPaced> outgoing(call.link_pacer);
  for (int step = 1; step < world; ++step) {
    const int to = schedule::moe_target(rank, world, step);
    const int32_t* const positions = call.position + to * call.space.routings();
    const float* const weights = weights_of(call, to);
    auto* const sums = call.staged_sums
                           ? reinterpret_cast<Vec<T>*>(call.staged_sums +
                                                       size_t(step - 1) * call.space.source_bytes())
                           : at<Vec<T>>(call, to, call.space.sums_at(to, rank));
    if (call.backward && column_group == 0) {
      const unsigned sent = send_d_gate_weight(call, to);
      if constexpr (kPaced) outgoing.add(__reduce_add_sync(~0u, sent) * int64_t(sizeof(float)));
    }
    const auto routings_of = [&](int64_t row) {
      return row < call.space.tokens
                 ? LaneRouting::of(positions + row * top_k,
                                   weights ? weights + row * top_k : nullptr, top_k)
                 : LaneRouting{};
    };
    LaneRouting next = routings_of(warp_of_grid());
    for (int64_t row = warp_of_grid(); row < call.space.tokens; row += warps_of_grid()) {
      const LaneRouting routing_idx = next;
      next = routings_of(row + warps_of_grid());
      bool comes = routing_idx.from >= 0;
      for (int i = 32 + lane(); i < top_k; i += 32) comes |= positions[row * top_k + i] >= 0;
      if (!__any_sync(~0u, comes)) continue;
      for (int64_t begin = first; begin < end; begin += 32 * kSentVecs) {
        const int64_t vec = begin + lane();
        float sum[kSentVecs][kElements] = {};
        add_weighted_vecs<T>(sum, results, vecs, vec, 32, end, routing_idx, positions + row * top_k,
                             weights ? weights + row * top_k : nullptr, top_k);
#pragma unroll
        for (int i = 0; i < kSentVecs; ++i) {
          if (vec + 32 * i < end) {
            sums[row * vecs + vec + 32 * i] = rounded<T, Vec<T>>(sum[i]);
          }
        }
      }
      outgoing.add((end - first) * int64_t(sizeof(Vec<T>)));
    }
    outgoing.end_rank();
    if (is_last_block(&call.state->sent_sums[column_group][to]) && threadIdx.x == 0) {
      if (column_group == 0) call.state->added = epoch;
      if (!call.staged_sums) {
        outgoing.tell(call.table.signals[to] + MoeSpace::sums_signal(column_group, rank), epoch);
      }
    }
  }
  outgoing.finish();
}

/// kElements of T, with the alignment of a vector access.
template <typename T, int kElements>
struct alignas(sizeof(T) * kElements < 16 ? sizeof(T) * kElements : 16) Few {
  T at[kElements];
};

/// Adds row `row` of the sums received from other ranks in [begin, end) whose bit in
/// `token_in_rank` is set: vector `vec` and further ones, `apart` from each other.
template <typename T>
__device__ void add_sums(float (&sum)[kSummedVecs][Vec<T>::kElements], const MoeCall& call,
                         unsigned token_in_rank, int begin, int end, int64_t row, int64_t vecs,
                         int64_t vec, int apart) {
#pragma unroll 1
  for (int r = begin; r < end; ++r) {
    if ((token_in_rank >> r & 1) == 0) continue;
    const auto* const from =
        at<uint4>(call, call.table.rank, call.space.sums_at(call.table.rank, r)) + row * vecs;
    uint4 words[kSummedVecs];
#pragma unroll
    for (int i = 0; i < kSummedVecs; ++i) {
      if (vec + i * apart < vecs) words[i] = load_fresh(from + vec + i * apart);
    }
#pragma unroll
    for (int i = 0; i < kSummedVecs; ++i) {
      if (vec + i * apart >= vecs) continue;
      const auto& remote = reinterpret_cast<const Vec<T>&>(words[i]);
#pragma unroll
      for (int e = 0; e < Vec<T>::kElements; ++e) sum[i][e] += to_float(remote.at[e]);
    }
  }
}

// `threads` per row: a block, or a warp, which waits less often for a row's positions.
template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads, 2)
    sum_ranks_kernel(MoeCall call, Few<Out, Vec<T>::kElements>* out, int column_groups,
                     int threads) {
  constexpr int kElements = Vec<T>::kElements;
  const int rank = call.table.rank, world = call.table.size, top_k = call.space.top_k;
  const int64_t vecs = call.space.hidden / kElements;
  const uint64_t epoch = this_epoch(&call.state->calls);
  const auto* const results = static_cast<const Vec<T>*>(call.results);
  const int32_t* const positions = call.position + rank * call.space.routings();
  const float* const weights = weights_of(call, rank);
  bool complete = !__syncthreads_or(has_given_up(call));
  // Longer deadline, as a peer itself waits for rows, in its first GEMM.
  Deadline deadline = call.deadline;
  deadline.deadline_ns = deadline.deadline_ns / 2 * 3;
  for (int column_group = 0; column_group < column_groups && complete; ++column_group) {
    complete = await(call, MoeSpace::sums_signal(column_group, 0), epoch, deadline);
  }
  const int thread = int(threadIdx.x) % threads, rows_of_block = kThreads / threads;
  const int64_t first = int64_t(blockIdx.x) * rows_of_block + int(threadIdx.x) / threads,
                step = int64_t(gridDim.x) * rows_of_block;
  struct Row {
    unsigned token_in_rank = 0;
    LaneRouting routing_idx;
  };
  const auto row_at = [&](int64_t row) -> Row {
    if (row >= call.rows) return {};
    return {
        call.token_in_rank[row],
        LaneRouting::of(positions + row * top_k, weights ? weights + row * top_k : nullptr, top_k)};
  };
  Row next = row_at(first);
  for (int64_t row = first; row < call.rows && complete; row += step) {
    const Row here = next;
    next = row_at(row + step);
    const unsigned token_in_rank = here.token_in_rank;
    if (call.backward) sum_d_gate_weight(call, row, thread, threads);
    for (int64_t begin = 0; begin < vecs; begin += threads * kSummedVecs) {
      const int64_t vec = begin + thread;
      // The local term is computed first, as it needs most registers.
      float local[kSummedVecs][kElements] = {};
      if (token_in_rank >> rank & 1) {
        add_weighted_vecs<T>(local, results, vecs, vec, threads, vecs, here.routing_idx,
                             positions + row * top_k, weights ? weights + row * top_k : nullptr,
                             top_k);
      }
      float sum[kSummedVecs][kElements] = {};
      add_sums<T>(sum, call, token_in_rank, 0, rank, row, vecs, vec, threads);
      if (token_in_rank >> rank & 1) {
#pragma unroll
        for (int i = 0; i < kSummedVecs; ++i) {
#pragma unroll
          for (int e = 0; e < kElements; ++e) sum[i][e] += local[i][e];
        }
      }
      add_sums<T>(sum, call, token_in_rank, rank + 1, world, row, vecs, vec, threads);
#pragma unroll
      for (int i = 0; i < kSummedVecs; ++i) {
        if (vec + i * threads < vecs) {
          out[row * vecs + vec + i * threads] = rounded<Out, Few<Out, kElements>>(sum[i]);
        }
      }
    }
  }
  if (complete) report_abandoned(call, epoch);
  __syncthreads();
  if (threadIdx.x == 0) finish_epoch_read(&call.state->calls, gridDim.x);
}

void require_known(bool known, const MoeCall& call) {
  if (known) return;
  throw InvalidArgument("moe on GPUs: dtype " + std::string(name_of(call.dtype)) +
                        ": expected bf16 or f16");
}

/// Calls body(T{}) for the layer's dtype.
template <typename Body>
void with_layer_type(const MoeCall& call, const Body& body) {
  const bool known = call.dtype == DType::bf16 || call.dtype == DType::f16;
  require_known(known, call);
  if (call.dtype == DType::bf16) {
    body(__nv_bfloat16{});
  } else {
    body(__half{});
  }
}

void launch_sending(const MoeCall& call, const void* rows, size_t row_bytes, bool encoded,
                    const ConcurrentBlocks& blocks, cudaStream_t stream) {
  with_pacing(call, [&]<bool kPaced>(std::bool_constant<kPaced>) {
    launch_blocks(send_rows_kernel<kPaced>, blocks, kSendingThreads, "send_rows_kernel", stream,
                  call, static_cast<const uint4*>(rows), int64_t(row_bytes / sizeof(uint4)),
                  encoded);
  });
}

}  // namespace

void launch_notify(const MoeCall& call, cudaStream_t stream) {
  const unsigned blocks = blocks_for(call.space.tokens, kThreads / 32, 4);
  with_pacing(call, [&]<bool kPaced>(std::bool_constant<kPaced>) {
    notify_kernel<kPaced><<<blocks, kThreads, 0, stream>>>(call);
  });
  check_launch("notify_kernel");
}

void launch_send_rows(const MoeCall& call, const void* x, int blocks, cudaStream_t stream) {
  launch_sending(call, x, call.space.row_bytes(), false, blocks, stream);
}

void launch_send_and_gather(const MoeCall& call, const void* x, int senders,
                            const GroupedTable& table, const MoeGather& gather, uint32_t* ready,
                            const ConcurrentBlocks& blocks, cudaStream_t stream) {
  with_pacing(call, [&]<bool kPaced>(std::bool_constant<kPaced>) {
    launch_blocks(send_and_gather_kernel<kPaced>, blocks, kSendingThreads, "send_and_gather_kernel",
                  stream, call, static_cast<const uint4*>(x), unsigned(senders),
                  RowSlots::of(table, ready), gather,
                  int64_t(call.space.row_bytes() / sizeof(uint4)));
  });
}

void launch_send_messages(const MoeCall& call, const std::byte* messages, int blocks,
                          cudaStream_t stream) {
  launch_sending(call, messages, call.space.row_message, true, blocks, stream);
}

void launch_send_sums(const MoeCall& call, schedule::Range columns, int column_group,
                      const ConcurrentBlocks& blocks, cudaStream_t stream) {
  with_layer_type(call, [&]<typename T>(T) {
    constexpr int kElements = Vec<T>::kElements;
    with_pacing(call, [&]<bool kPaced>(std::bool_constant<kPaced>) {
      launch_blocks(send_sums_kernel<T, kPaced>, blocks, kSummingThreads, "send_sums_kernel",
                    stream, call, columns.begin / kElements, columns.end() / kElements,
                    column_group);
    });
  });
}

void launch_sum_ranks(const MoeCall& call, const Tensor& out, int column_groups,
                      cudaStream_t stream) {
  with_layer_type(call, [&]<typename T>(T) {
    const auto launch = [&]<typename Out>(Out) {
      const int threads = call.rows < kManyRows ? kThreads : 32;
      sum_ranks_kernel<T, Out>
          <<<blocks_for(call.rows, kThreads / threads, 2), kThreads, 0, stream>>>(
              call, out.as<Few<Out, Vec<T>::kElements>>(), call.table.size > 1 ? column_groups : 0,
              threads);
    };
    if (out.dtype() == DType::f32) {
      launch(float{});
    } else {
      launch(T{});
    }
  });
  check_launch("sum_ranks_kernel");
}

}  // namespace tandem::gpu
