#include "engine/infer/prefill.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "engine/infer/chunked_prefill.h"
#include "overlap/contract/receipt.h"
#include "tandem/error.h"
#include "tune/measure.h"
#include "tune/tuner.h"

namespace tandem {
namespace {

/// Min rows for two chunks: with fewer, half-size GEMMs are slower.
constexpr int64_t kMinRowsOfTwoChunks = 64;

/// `block` runs all calls of the candidate.
template <typename Block>
Prefill candidate_of(std::string name, Strategy form, std::shared_ptr<Block> block, int chunks) {
  return {
      .name = std::move(name),
      .form = form,
      .run = [block = std::move(block)](std::span<const int32_t> tokens, int64_t position,
                                        const Tensor& last) { block->run(tokens, position, last); },
      .chunks = chunks};
}

Prefill rows_split(const DecoderContext& c, int64_t rows, const OverlapOptions& overlap) {
  return candidate_of("rows split", Strategy::serial,
                      std::make_shared<PrefillBlock>(c, rows, overlap), 1);
}
Prefill in_chunks(const DecoderContext& c, int64_t rows, int chunks) {
  return candidate_of(chunks == 1 ? "one chunk" : "ISO",
                      chunks == 1 ? Strategy::serial : Strategy::overlapped,
                      std::make_shared<ChunkedPrefill>(c, rows, chunks), chunks);
}

bool has_chunks(const DecoderContext& c) {
  if (c.int8) return true;
  return c.tp.size() > 1 && c.config.moe_layers() == 0 && c.forms().has_row_sums;
}
bool splits_rows(const DecoderContext& c) {
  return !c.int8 && (!has_chunks(c) || c.codec.is_none());
}
Prefill serial(const DecoderContext& c, int64_t rows, const OverlapOptions& overlap) {
  return splits_rows(c) ? rows_split(c, rows, overlap) : in_chunks(c, rows, 1);
}

/// Candidates with the context's codec, serial first.
std::vector<Prefill> with_codec(const DecoderContext& c, int64_t rows,
                                const OverlapOptions& overlap) {
  std::vector<Prefill> all;
  if (splits_rows(c)) all.push_back(rows_split(c, rows, overlap));
  if (!has_chunks(c)) return all;
  all.push_back(in_chunks(c, rows, 1));
  if (c.tp.size() > 1) all.push_back(in_chunks(c, rows, 2));
  return all;
}

/// Whether uncompressed candidates are added to those with the context's codec.
bool keeps_uncompressed(const DecoderContext& c, const OverlapOptions& overlap) {
  return overlap.allow_uncompressed && !c.codec.is_none() && c.tp.size() > 1;
}

/// The fastest candidate, timed on dummy tokens whose cached keys are never read.
Choice fastest(const DecoderContext& c, int64_t rows, const std::vector<Prefill>& candidates,
               Bits bits) {
  const ModelConfig& m = c.config;
  const std::vector<int32_t> tokens(size_t(std::min(rows, c.cache.max_tokens())), 0);
  const Activation last = c.f32(1, m.hidden);
  std::vector<std::string> names;
  for (const Prefill& each : candidates) names.push_back(each.name);
  std::string shape = fmt::format(
      "rows {} hidden {} layers {} heads {} kv_heads {} head_dim {} ffn {} block {} {} codec {}",
      rows, m.hidden, m.layers, m.heads, m.kv_heads, m.head_dim, m.ffn, m.parallel_block,
      name_of(c.dtype), c.codec.describe());
  if (c.int8) shape += " weights int8";
  if (m.sliding_window > 0) {
    shape += fmt::format(" window {} full {}", m.sliding_window, m.full_attention_freq);
  }
  const auto seconds = [&](size_t i) {
    return timed(c.tp, [&] { candidates[i].run(tokens, 0, last); })();
  };
  return tune(c.tp, "prefill", shape, names, seconds, bits);
}

/// The chosen one of `all`, whose calls are counted in a receipt.
Prefill with_receipt(const DecoderContext& c, int64_t rows, Strategy asked,
                     std::vector<Prefill> all, const Choice& choice, const std::string& refusals) {
  Receipt receipt{.op = "prefill",
                  .shape = fmt::format("rows {} layers {} hidden {} {}", rows, c.config.layers,
                                       c.config.hidden, name_of(c.dtype)),
                  .dtype = std::string(name_of(c.dtype)),
                  .group = c.tp.size(),
                  .asked = c.tp.size() == 1 ? Strategy::serial : asked};
  std::vector<NamedForm> forms;
  for (const Prefill& each : all) forms.push_back({each.name, each.form});
  record_choice(receipt, forms, choice.us, choice, refusals);
  require_as_asked(receipt, false);
  Prefill made = std::move(all[choice]);
  made.run = [run = std::move(made.run), counted = list_receipt(std::move(receipt))](
                 std::span<const int32_t> tokens, int64_t position, const Tensor& last) {
    ++counted->calls;
    run(tokens, position, last);
  };
  return made;
}

const char* unchunked(const DecoderContext& c) {
  return !c.forms().has_row_sums ? "GPUs" : c.tp.size() == 1 ? "one rank" : "experts";
}

}  // namespace

Strategy parse_prefill(std::string_view text) {
  if (text == "automatic") return Strategy::automatic;
  if (text == "serial") return Strategy::serial;
  if (text == "iso") return Strategy::overlapped;
  throw InvalidArgument(fmt::format("prefill '{}': expected automatic, serial or iso", text));
}

std::vector<Prefill> prefill_candidates(const DecoderContext& c, int64_t rows,
                                        const OverlapOptions& overlap) {
  if (!keeps_uncompressed(c, overlap)) return with_codec(c, rows, overlap);
  DecoderContext uncompressed = c;
  uncompressed.codec = {};
  std::vector<Prefill> all = with_codec(uncompressed, rows, overlap);
  for (Prefill& each : with_codec(c, rows, overlap)) {
    each.name += " as " + c.codec.describe();
    all.push_back(std::move(each));
  }
  return all;
}

Prefill make_prefill(const DecoderContext& c, int64_t rows, const OverlapOptions& overlap,
                     Strategy strategy) {
  if (strategy == Strategy::overlapped) {
    if (!has_chunks(c) || c.tp.size() == 1) {
      throw InvalidArgument(fmt::format(
          "prefill 'iso' with {}: expected a dense model on two CPU ranks or more", unchunked(c)));
    }
    return with_receipt(c, rows, strategy, {in_chunks(c, rows, 2)}, {}, {});
  }
  const bool single = (!has_chunks(c) || c.tp.size() == 1) && !keeps_uncompressed(c, overlap);
  if (strategy == Strategy::serial || single || rows < kMinRowsOfTwoChunks) {
    const std::string refusal =
        single
            ? fmt::format("ISO: {}: expected a dense model on two CPU ranks or more", unchunked(c))
            : fmt::format("ISO: {} rows: expected at least {}", rows, kMinRowsOfTwoChunks);
    return with_receipt(c, rows, strategy, {serial(c, rows, overlap)}, {}, refusal);
  }
  std::vector<Prefill> all = prefill_candidates(c, rows, overlap);
  const Choice choice =
      fastest(c, rows, all, keeps_uncompressed(c, overlap) ? Bits::by_candidate : Bits::same);
  return with_receipt(c, rows, strategy, std::move(all), choice, {});
}

}  // namespace tandem
