#include "core/cuda/check.h"
#include "core/cuda/concurrent.cuh"
#include "core/cuda/load_module.cuh"
#include "overlap/moe/cuda/exchange.cuh"
#include "overlap/moe/cuda/wire.cuh"
#include "overlap/moe/cuda/wire.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 512;

/// This rank's expert results for row `row` of rank `of`.
__device__ ExpertResults results_of(const MoeCall& call, int of, int64_t row) {
  const int top_k = call.space.top_k;
  return {call.results,
          call.dtype,
          call.space.hidden,
          call.position + of * call.space.routings() + row * top_k,
          weights_of(call, of) + row * top_k,
          top_k};
}

template <typename Block, bool kPaced>
__global__ void __launch_bounds__(kThreads, 1)
    send_encoded_sums_kernel(const __grid_constant__ MoeCall call,
                             const __grid_constant__ WireParams wire, int64_t begin, int64_t end,
                             int column_group) {
  allow_kernel_behind();
  const int rank = call.table.rank, world = call.table.size, top_k = call.space.top_k;
  if (has_given_up(call)) return;
  const uint64_t epoch = this_epoch(&call.state->calls);
  Outgoing<kPaced> outgoing(call.link_pacer);
  for (int step = 1; step < world; ++step) {
    const int to = schedule::moe_target(rank, world, step);
    auto* const messages = at<std::byte>(call, to, call.space.sum_messages_at(to, rank));
    for_row_slices(call.space.tokens, begin, end, [&](int64_t row, int64_t first) {
      const ExpertResults results = results_of(call, to, row);
      bool comes = false;
      for (int i = lane(); i < top_k; i += 32) comes |= results.position[i] >= 0;
      if (!__any_sync(~0u, comes)) return;
      encode_sum<Block>(wire, results, first, end, messages + row * wire.layout.bytes);
      if constexpr (kPaced) {
        const int64_t blocks = min(int64_t(kWarpBlocks), end - first), all = wire.layout.blocks;
        outgoing.add((blocks * wire.layout.bytes + all - 1) / all);
      }
    });
    outgoing.end_rank();
    if (is_last_block(&call.state->sent_sums[column_group][to]) && threadIdx.x == 0) {
      if (column_group == 0) call.state->added = epoch;
      outgoing.tell(call.table.signals[to] + MoeSpace::sums_signal(column_group, rank), epoch);
    }
  }
  outgoing.finish();
}

template <typename Block>
__global__ void __launch_bounds__(kThreads, 1)
    sum_encoded_ranks_kernel(const __grid_constant__ MoeCall call,
                             const __grid_constant__ WireParams wire, std::byte* out,
                             DType out_dtype, int column_groups, const Deadline deadline) {
  const int rank = call.table.rank, world = call.table.size;
  const int64_t hidden = call.space.hidden, out_bytes = hidden * (out_dtype == DType::f32 ? 4 : 2);
  const uint64_t epoch = this_epoch(&call.state->calls);
  bool complete = !__syncthreads_or(has_given_up(call));
  for (int column_group = 0; column_group < column_groups && complete; ++column_group) {
    complete = await(call, MoeSpace::sums_signal(column_group, 0), epoch, deadline);
  }
  const auto sum_slice = [&](int64_t row, int64_t first) {
    const BlockPosition position(first, wire.layout.blocks);
    const unsigned token_in_rank = call.token_in_rank[row];
    float sum[kLaneValues] = {};
    for (int r = 0; r < world; ++r) {
      if ((token_in_rank >> r & 1) == 0) continue;
      if (r != rank) {
        const auto* const messages =
            at<const std::byte>(call, rank, call.space.sum_messages_at(rank, r));
        add_message<Block>(wire, messages + row * wire.layout.bytes, position, sum);
        continue;
      }
      float local[kLaneValues] = {};
      results_of(call, rank, row).add_to(local, position);
#pragma unroll
      for (int e = 0; e < kLaneValues; ++e) sum[e] = __fadd_rn(sum[e], local[e]);
    }
    store_elements(out + row * out_bytes, out_dtype, hidden, position.block, position.lane,
                   position.on, sum);
  };
  if (complete) for_row_slices(call.rows, 0, wire.layout.blocks, sum_slice);
  if (complete) report_abandoned(call, epoch);
  __syncthreads();
  if (threadIdx.x == 0) finish_epoch_read(&call.state->calls, gridDim.x);
}

}  // namespace

void launch_send_encoded_sums(const MoeCall& call, const Wire& wire, schedule::Range columns,
                              int column_group, const ConcurrentBlocks& blocks,
                              cudaStream_t stream) {
  const WireParams params = WireParams::of(wire, call.space.hidden, call.dtype);
  const int64_t begin = columns.begin / kWireBlock,
                end = (columns.end() + kWireBlock - 1) / kWireBlock;
  with_block(wire, [&]<typename Block>() {
    with_pacing(call, [&]<bool kPaced>(std::bool_constant<kPaced>) {
      launch_blocks(send_encoded_sums_kernel<Block, kPaced>, blocks, kThreads,
                    "send_encoded_sums_kernel", stream, call, params, begin, end, column_group);
    });
  });
}

void launch_sum_encoded_ranks(const MoeCall& call, const Wire& wire, const Tensor& out,
                              int column_groups, cudaStream_t stream) {
  const WireParams params = WireParams::of(wire, call.space.hidden, call.dtype);
  const int64_t row_slices = (params.layout.blocks + kWarpBlocks - 1) / kWarpBlocks;
  const unsigned grid = blocks_for(call.rows * row_slices, kThreads / 32, 2);
  // Longer deadline, as a peer itself waits for rows.
  const Deadline deadline{call.deadline.record, call.deadline.deadline_ns / 2 * 3};
  with_block(wire, [&]<typename Block>() {
    sum_encoded_ranks_kernel<Block><<<grid, kThreads, 0, stream>>>(
        call, params, out.as<std::byte>(), out.dtype(), column_groups, deadline);
  });
  check_launch("sum_encoded_ranks_kernel");
}

}  // namespace tandem::gpu
