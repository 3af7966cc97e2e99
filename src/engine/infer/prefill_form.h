// Prefill forms, and the selection among them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/infer/decoder.h"
#include "tune/candidate.h"

namespace tandem {

enum class PrefillForm : uint8_t {
  automatic,  ///< the fastest by the tuner
  serial,     ///< computation and communication sequentially
  iso,        ///< two chunks, each computed while the other's sums are in flight (arXiv 2409.11155)
};
/// Throws InvalidArgument for an unknown name.
PrefillForm parse_prefill_form(std::string_view text);

struct PrefillCandidate {
  std::string name;
  Form form;
  std::unique_ptr<Prefill> prefill;
};

/// Candidates for the context's model, up to `rows` tokens per call, serial first. All are bitwise
/// equal, without a codec or with the same one (see rows_keep_bits in gemm/gemm.h): with a codec
/// every rank holds whole residuals. Models with experts, and single ranks, have one form. If a
/// codec is set and `overlap.allow_uncompressed`, uncompressed candidates precede the others.
/// Collective.
std::vector<PrefillCandidate> prefill_candidates(const DecoderContext& context, int64_t rows,
                                                 const OverlapOptions& overlap);

/// Creates one candidate; `automatic` measures them if `rows` suffice for two chunks. Throws
/// InvalidArgument for `iso` if that form is not available. Collective.
PrefillCandidate make_prefill(const DecoderContext& context, int64_t rows,
                              const OverlapOptions& overlap, PrefillForm form);

}  // namespace tandem
