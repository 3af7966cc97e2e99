// Candidates for the prefill of a prompt, and the choice among them.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "engine/infer/decoder.h"
#include "tune/candidate.h"

namespace tandem {

/// Processes a block of prompt tokens. `run(tokens, position, last)` appends tokens, at most the
/// number set at construction, at `position`, and writes the last one's residual to `last`, f32
/// [1, hidden], on every rank.
using Prefill = CandidateOf<std::span<const int32_t>, int64_t, const Tensor&>;

/// "automatic"; "serial": computation and communication sequentially; or "iso", the overlapped one:
/// two chunks, each computed while the other's sums are in flight (arXiv 2409.11155). Throws
/// InvalidArgument for another name.
Strategy parse_prefill(std::string_view text);

/// Candidates for the context's model, up to `rows` tokens per call, serial first. All are bitwise
/// equal, without a codec or with the same one (see rows_keep_bits in gemm/gemm.h): with a codec
/// every rank holds whole residuals. Models with experts, and single ranks, have one form;
/// weights in int8 have no form with split rows. If a
/// codec is set and `overlap.allow_uncompressed`, uncompressed candidates precede the others.
/// Collective.
std::vector<Prefill> prefill_candidates(const DecoderContext& context, int64_t rows,
                                        const OverlapOptions& overlap);

/// Creates one candidate, with a receipt; `automatic` measures them if `rows` suffice for two
/// chunks. Throws InvalidArgument for `overlapped` if that form is not available, Unsupported with
/// TANDEM_STRICT=1 if several ranks would not overlap as asked. Collective.
Prefill make_prefill(const DecoderContext& context, int64_t rows, const OverlapOptions& overlap,
                     Strategy strategy);

}  // namespace tandem
