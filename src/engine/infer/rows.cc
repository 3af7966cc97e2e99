#include "engine/infer/rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/infer/replicated_rows.h"
#include "engine/infer/sharded_rows.h"
#include "gemm/gemm.h"
#include "kernels/elementwise.h"
#include "tandem/error.h"
#include "tune/measure.h"
#include "tune/tuner.h"

namespace tandem {
namespace {

/// Min rows for two chunks: with fewer, half-size GEMMs are slower.
constexpr int64_t kMinRowsOfTwoChunks = 64;
/// With fewer rows a sum over GPUs takes little time, and less than its operators' kernels need.
constexpr int64_t kMinShardedRows = 512;

const RowsForm kOneChunk{"one chunk", Strategy::serial, RowsKind::replicated, 1};
const RowsForm kTwoChunks{"ISO", Strategy::overlapped, RowsKind::replicated, 2};
const RowsForm kSharded{"rows split", Strategy::serial, RowsKind::sharded, 1};

bool has_two_chunks(const DecoderContext& c) {
  return c.tp.size() > 1 && c.forms().has_row_sums && (c.coded || !c.has_experts());
}

/// Whether uncompressed forms are added to those with the context's codec.
bool keeps_uncompressed(const DecoderContext& c, const OverlapOptions& overlap) {
  const bool encodes_experts = c.has_experts() && !c.codec.experts.is_none();
  return overlap.allow_uncompressed && !c.codec.is_none() && !encodes_experts && c.tp.size() > 1;
}

/// Times the forms on dummy tokens whose cached keys are never read.
Choice fastest(const DecoderContext& c, int64_t rows, const std::vector<RowsForm>& forms,
               const std::vector<std::unique_ptr<RowRunner>>& runners, Bits bits) {
  const ModelConfig& m = c.config;
  const int64_t count = std::min({rows, c.cache.max_tokens(), c.cache.num_pages() * kPageTokens});
  const Activation tokens(DType::i32, 1, rows);
  clear({}, tokens);
  std::vector<std::string> names;
  for (const RowsForm& each : forms) names.push_back(each.name);
  std::string shape = fmt::format(
      "rows {} hidden {} layers {} heads {} kv_heads {} head_dim {} ffn {} block {} {} codec {}",
      rows, m.hidden, m.layers, m.heads, m.kv_heads, m.head_dim, m.ffn, m.parallel_block,
      name_of(c.dtype), c.codec.describe());
  if (c.coded) shape += fmt::format(" weights {}", name_of(c.coded->format()));
  if (m.experts > 0) shape += fmt::format(" experts {} top {}", m.experts, m.top_k);
  if (m.sliding_window > 0) {
    shape += fmt::format(" window {} full {}", m.sliding_window, m.full_attention_freq);
  }
  c.cache.set_rows(0, count);
  const auto seconds = [&](size_t i) {
    return timed(c.tp,
                 [&] { runners[i]->run(Tensor(tokens->data(), DType::i32, {rows}), count); })();
  };
  return tune(c.tp, "prefill", shape, names, seconds, bits);
}

/// Receipt of the choice among forms.
std::shared_ptr<Receipt> receipt_of(const DecoderContext& c, int64_t rows, Strategy asked,
                                    const std::vector<RowsForm>& forms, const Choice& choice,
                                    const std::string& refusals) {
  Receipt receipt{.op = "prefill",
                  .shape = fmt::format("rows {} layers {} hidden {} {}", rows, c.config.layers,
                                       c.config.hidden, name_of(c.dtype)),
                  .dtype = std::string(name_of(c.dtype)),
                  .group = c.tp.size(),
                  .asked = c.tp.size() == 1 ? Strategy::serial : asked};
  std::vector<NamedForm> named;
  for (const RowsForm& each : forms) named.push_back({each.name, each.form});
  record_choice(receipt, named, choice.us, choice, refusals);
  require_as_asked(receipt, false);
  return list_receipt(std::move(receipt));
}

const char* unchunked(const DecoderContext& c) {
  return !c.forms().has_row_sums ? "GPUs" : c.tp.size() == 1 ? "one rank" : "experts";
}

std::string why_one_chunk(const DecoderContext& c, int64_t rows) {
  if (!has_two_chunks(c)) {
    return fmt::format("ISO: {}: expected a dense model on two CPU ranks or more", unchunked(c));
  }
  if (c.coded) {
    return fmt::format("ISO: weights in {}, which are set later than forms are timed: expected iso",
                       name_of(c.coded->format()));
  }
  return fmt::format("ISO: {} rows: expected at least {}", rows, kMinRowsOfTwoChunks);
}

/// Forms with the context's codec.
std::vector<RowsForm> with_codec(const DecoderContext& c) {
  std::vector<RowsForm> all;
  if (c.tp.size() > 1 && !c.coded && c.codec.is_none()) all.push_back(kSharded);
  all.push_back(kOneChunk);
  if (has_two_chunks(c)) all.push_back(kTwoChunks);
  return all;
}

}  // namespace

void check_batch_invariant(const DecoderContext& c, int64_t chosen) {
  const auto check = [](bool holds, const std::string& what, const std::string& expected) {
    if (holds) return;
    throw Unsupported(fmt::format("batch-invariant tokens with {}: expected {}", what, expected));
  };
  check(!c.has_experts() || c.codec.experts.is_exact(), "a lossy wire format of experts",
        "an exact one");
  if (c.forms().has_row_sums) {
    return check(rows_keep_bits(), "this build's GEMM", "a CPU with AVX2, and a build for it");
  }
  check(c.tp.size() == 1, fmt::format("{} GPU ranks", c.tp.size()), "1");
  check(!c.has_experts(), "experts on a GPU", "a dense model, or CPU ranks");
  check(c.dtype == DType::bf16, fmt::format("{} on a GPU", name_of(c.dtype)), "bf16");
  check(chosen <= kMaxFewRows, fmt::format("{} texts at once on a GPU", chosen),
        fmt::format("at most {}", kMaxFewRows));
}

Strategy parse_prefill(std::string_view text) {
  if (text == "automatic") return Strategy::automatic;
  if (text == "serial") return Strategy::serial;
  if (text == "iso") return Strategy::overlapped;
  throw InvalidArgument(fmt::format("prefill '{}': expected automatic, serial or iso", text));
}

std::vector<RowsForm> rows_forms(const DecoderContext& c, const OverlapOptions& overlap) {
  if (!keeps_uncompressed(c, overlap)) return with_codec(c);
  DecoderContext uncompressed = c;
  uncompressed.codec = {};
  std::vector<RowsForm> all = with_codec(uncompressed);
  for (RowsForm& each : all) each.is_encoded = false;
  for (RowsForm& each : with_codec(c)) {
    each.name += " as " + c.codec.describe();
    all.push_back(std::move(each));
  }
  return all;
}

std::unique_ptr<RowRunner> make_row_runner(const DecoderContext& c, const RowsForm& form,
                                           int64_t rows, const OverlapOptions& overlap,
                                           StepMemory& memory, StepExperts* experts) {
  DecoderContext context = c;
  if (!form.is_encoded) context.codec = {};
  if (form.kind == RowsKind::sharded) {
    return std::make_unique<ShardedRows>(context, rows, overlap, memory, experts);
  }
  return std::make_unique<ReplicatedRows>(context, rows, form.chunks, memory, experts);
}

ChosenRows choose_rows(const DecoderContext& c, int64_t rows, const RowsOptions& options,
                       StepMemory& memory, StepExperts* experts) {
  const OverlapOptions& overlap = options.overlap;
  const Strategy strategy = options.prefill;
  const auto make = [&](const RowsForm& form) {
    return make_row_runner(c, form, rows, overlap, memory, experts);
  };
  if (options.form) return {*options.form, make(*options.form), nullptr};
  if (strategy == Strategy::overlapped && !has_two_chunks(c)) {
    throw InvalidArgument(fmt::format(
        "prefill 'iso' with {}: expected a dense model on two CPU ranks or more", unchunked(c)));
  }
  if (!c.forms().has_row_sums) {
    if (c.tp.size() == 1 || rows < kMinShardedRows) return {kOneChunk, nullptr, nullptr};
    return {kSharded, make(kSharded), nullptr};
  }
  if (strategy == Strategy::overlapped) {
    return {kTwoChunks, make(kTwoChunks), receipt_of(c, rows, strategy, {kTwoChunks}, {}, {})};
  }
  if (strategy == Strategy::serial) return {kOneChunk, nullptr, nullptr};
  std::vector<RowsForm> forms = rows_forms(c, overlap);
  if (forms.size() == 1 || rows < kMinRowsOfTwoChunks || c.coded) {
    return {kOneChunk, nullptr,
            receipt_of(c, rows, strategy, {kOneChunk}, {}, why_one_chunk(c, rows))};
  }
  std::vector<std::unique_ptr<RowRunner>> runners;
  for (const RowsForm& form : forms) runners.push_back(make(form));
  const Choice choice = fastest(c, rows, forms, runners,
                                keeps_uncompressed(c, overlap) ? Bits::by_candidate : Bits::same);
  const auto receipt =
      receipt_of(c, rows, strategy, forms, choice, has_two_chunks(c) ? "" : why_one_chunk(c, rows));
  return {std::move(forms[choice]), std::move(runners[choice]), receipt};
}

}  // namespace tandem
