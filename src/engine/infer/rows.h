// Forms of holding the rows of a step that has prompts on several ranks, and the choice among them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/infer/decoder_context.h"
#include "engine/infer/row_runner.h"
#include "engine/infer/step_experts.h"
#include "overlap/contract/receipt.h"

namespace tandem {

enum class RowsKind : uint8_t { replicated, sharded };

struct RowsForm {
  std::string name;  ///< equal on all ranks; also the tuner's name
  Strategy form = Strategy::serial;
  RowsKind kind = RowsKind::replicated;
  int chunks = 1;
  bool is_encoded = true;  ///< in the context's wire formats, if it has some
};

/// "automatic"; "serial": computation and communication sequentially; or "iso", the overlapped one:
/// two chunks, each computed while the other's sums are in flight (arXiv 2409.11155). Throws
/// InvalidArgument for another name.
Strategy parse_prefill(std::string_view text);

/// Forms of CPU ranks for the context's model, serial ones first. All are bitwise equal, without a
/// codec or with the same one (see rows_keep_bits in gemm/gemm.h): with a codec every rank has all
/// rows. Models with experts have no chunks, coded weights no sharded rows on CPU ranks. If a codec
/// is set and `overlap.allow_uncompressed`, uncompressed forms precede the others.
std::vector<RowsForm> rows_forms(const DecoderContext& context, const OverlapOptions& overlap);

/// Runner of steps of up to `rows` rows. Collective.
std::unique_ptr<RowRunner> make_row_runner(const DecoderContext& context, const RowsForm& form,
                                           int64_t rows, const OverlapOptions& overlap,
                                           StepMemory& memory, StepExperts* experts);

/// A form for large steps, or all steps.
struct ChosenRows {
  RowsForm form;
  std::unique_ptr<RowRunner> runner;  ///< nullptr: one chunk in the context's wire formats
  std::shared_ptr<Receipt> receipt;   ///< of CPU ranks that were not asked for `serial`
};

struct RowsOptions {
  OverlapOptions overlap = {};          ///< of the experts, and of GEMMs of sharded rows
  Strategy prefill = Strategy::serial;  ///< of steps that have prompts
  std::optional<RowsForm> form = {};    ///< instead of a choice
  /// A row's bits do not depend on other rows of its step, which has prompts or none. CPU ranks
  /// have that in any case; one GPU, in bf16 and without experts, with up to kMaxFewRows tokens
  /// that a step writes.
  bool batch_invariant = false;
};

/// Throws Unsupported naming what `batch_invariant` lacks.
void check_batch_invariant(const DecoderContext& context, int64_t chosen);

/// On CPU ranks the form of `options.prefill`; `automatic` measures them if `rows` suffice for two
/// chunks and weights are not coded. On GPU ranks sharded rows if there are enough. Throws
/// InvalidArgument for `overlapped` if that form is not available, Unsupported with TANDEM_STRICT=1
/// if several ranks would not overlap as asked. Collective.
ChosenRows choose_rows(const DecoderContext& context, int64_t rows, const RowsOptions& options,
                       StepMemory& memory, StepExperts* experts);

}  // namespace tandem
