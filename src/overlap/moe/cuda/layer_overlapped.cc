// Forward pass of MoeOnGpus with rows sorted concurrently with the first GEMM. All of it is on one
// stream: a GEMM that runs concurrently with a kernel begins once all blocks of that kernel run
// (concurrent.cuh), so that it cannot keep the kernel it waits for from starting.
#include "overlap/moe/cuda/layer.h"
#include "overlap/moe/cuda/memory.h"
#include "overlap/moe/cuda/wire.h"

namespace tandem::gpu {

void MoeOnGpus::overlap_sort(size_t number, const MoeCall& call, const Tensor& x, const Rows& rows,
                             GroupedArgs in) {
  const Blocks& candidate = blocks_[number];
  const int table = tables_[number].in;
  const cudaStream_t stream = comm_.stream();
  const GroupedTable& order = in_sorted_->table(table);
  // in.x is the destination of the rows.
  const MoeGather gather = gathering(rows, const_cast<void*>(in.x));
  const ConcurrentBlocks blocks{candidate.blocks_while_sorting(), experts_.paired};
  if (candidate.sends_while_sorting()) {
    launch_send_and_gather(call, x.data(), candidate.sending_blocks, order, gather, uints(ready_),
                           blocks, stream);
  } else {
    launch_overlapped_gather(order, gather, uints(ready_), blocks, stream);
  }
  in.ready = uints(ready_);
  in_sorted_->launch(in, stream, table);
}

void MoeOnGpus::multiply_out_overlapped(size_t number, const MoeCall& call, const Tensor& w_out) {
  const Blocks& candidate = blocks_[number];
  const Tables& tables = tables_[number];
  const cudaStream_t stream = comm_.stream();
  const schedule::Range columns = tables.columns[0];
  GroupedArgs args = second_product(w_out);
  out_->launch(args, stream, tables.out[0]);
  if (candidate.combine.is_none()) {
    launch_send_sums(call, columns, 0, {candidate.summing_blocks, experts_.paired}, stream);
  } else {
    launch_send_encoded_sums(call, candidate.combine, columns, 0,
                             {candidate.summing_blocks, experts_.paired}, stream);
  }
  args.concurrent = true;
  out_->launch(args, stream, tables.out[1]);
}

}  // namespace tandem::gpu
