// Dispatch and combine of a Mixture-of-Experts layer on GPUs in a wire format with groups; replaces
// exchange.h's uncompressed transfers. Rows and sums are messages with the codes and scales that
// CPU ranks send (collectives/rows/row_messages.h); the bytes between a message's sections are
// never written.
//   encode rows    each once, whatever its number of destinations. All ranks use decoded rows, so
//                  rows that stay local are decoded, too
//   send messages  exchange.h
//   decode rows    one rank after another, as they arrive; signalled locally, for GEMMs whose tiles
//                  wait
//   send sums      rounded, then encoded where they are summed, and stored at their receiver
//   sum            decodes what it adds, in f32; this rank's term is neither rounded nor encoded
#pragma once

#include "overlap/moe/cuda/exchange.h"
#include "tandem/codec.h"

namespace tandem::gpu {

/// Encodes every row of x that is sent to other ranks to its message in `messages` ([rows], each of
/// space.row_message bytes), and writes the decoded values of every row with local experts to
/// `local` [rows, hidden].
void launch_encode_rows(const MoeCall& call, const Wire& wire, const void* x, std::byte* messages,
                        void* local, cudaStream_t stream);
/// Decodes the received rows with experts in `experts` to `rows`, in the layout of uncompressed
/// rows in symmetric memory. Waits for all other ranks; a late one fails the call.
void launch_decode_rows(const MoeCall& call, const Wire& wire, schedule::Range experts,
                        std::byte* rows, int blocks, cudaStream_t stream);
/// `columns` must begin and end at whole blocks, or at the row's ends.
void launch_send_encoded_sums(const MoeCall& call, const Wire& wire, schedule::Range columns,
                              int column_group, const ConcurrentBlocks& blocks,
                              cudaStream_t stream);
/// As launch_sum_ranks, for a forward pass.
void launch_sum_encoded_ranks(const MoeCall& call, const Wire& wire, const Tensor& out,
                              int column_groups, cudaStream_t stream);

}  // namespace tandem::gpu
