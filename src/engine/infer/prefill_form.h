// The forms in which a prompt can run, and the choice among them.
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
  serial,     ///< computation and communication one after the other
  iso,        ///< two chunks, each computed while the other's sums travel (arXiv 2409.11155)
};
/// Throws InvalidArgument for another name than these.
PrefillForm parse_prefill_form(std::string_view text);

struct PrefillCandidate {
  std::string name;
  Form form;
  std::unique_ptr<Prefill> prefill;
};

/// Collective: those of the context's model, up to `rows` tokens at once, the first serial. Without
/// a codec all give the same bits, and with one as well (see rows_keep_bits in gemm/gemm.h): with a
/// codec residuals are whole on every rank. Models with experts, and one rank, have a single form.
/// With a codec and `overlap.or_plain`, the forms without it are there, too, before the others.
std::vector<PrefillCandidate> prefill_candidates(const DecoderContext& context, int64_t rows,
                                                 const OverlapOptions& overlap);

/// Collective: one of them; `automatic` measures them where `rows` are many enough for two chunks.
/// Throws InvalidArgument for `iso` where there is no such form.
PrefillCandidate make_prefill(const DecoderContext& context, int64_t rows,
                              const OverlapOptions& overlap, PrefillForm form);

}  // namespace tandem
