// What the ranks of a Mixture-of-Experts layer on GPUs send each other in a wire format with
// groups, in the place of what exchange.h sends plain. Rows and sums are messages with the
// codes and scales that CPU ranks send (collectives/row_messages.h); the bytes between a message's
// parts are never written.
//
//   encode rows    each once, whatever the number of ranks that it goes to. All ranks use decoded
//                  rows, so that those that stay are decoded, too
//   send messages  exchange.h
//   decode rows    of one rank after the other, as they arrive. It is signalled where it happens,
//                  for products whose tiles wait
//   send sums      rounded, then encoded where they are summed, and stored at their receiver
//   sum            decodes what it adds, in f32; this rank's own term is neither rounded nor
//                  encoded
#pragma once

#include "overlap/moe/cuda/exchange.h"
#include "tandem/codec.h"

namespace tandem::gpu {

/// Every row of x that goes to other ranks to its message in `messages` ([rows], each of
/// space.row_message bytes), and what every row with experts here decodes as to `own` [rows,
/// hidden].
void launch_encode_rows(const MoeCall& call, const Wire& wire, const void* x, std::byte* messages,
                        void* own, cudaStream_t stream);
/// The rows that have arrived with experts of `experts`, to `rows`: where they would lie plain in
/// symmetric memory. Waits for all other ranks, and gives up on those that do not come.
void launch_decode_rows(const MoeCall& call, const Wire& wire, schedule::Range experts,
                        std::byte* rows, int blocks, cudaStream_t stream);
/// `columns` begin and end at whole blocks, or with the row.
void launch_send_encoded_sums(const MoeCall& call, const Wire& wire, schedule::Range columns,
                              int part, const BesideBlocks& blocks, cudaStream_t stream);
/// As launch_sum_ranks, of a forward pass.
void launch_sum_encoded_ranks(const MoeCall& call, const Wire& wire, const Tensor& out, int parts,
                              cudaStream_t stream);

}  // namespace tandem::gpu
