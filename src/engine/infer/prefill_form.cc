#include "engine/infer/prefill_form.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/infer/chunked_prefill.h"
#include "tandem/error.h"
#include "tune/measure.h"
#include "tune/tuner.h"

namespace tandem {
namespace {

/// Min rows for two chunks: with fewer, half-size GEMMs are slower.
constexpr int64_t kMinRowsOfTwoChunks = 64;

enum class Kind { rows_split, one_chunk, two_chunks };

/// Candidate forms, serial first.
std::vector<Kind> kinds_for(const DecoderContext& c) {
  if (c.tp.size() == 1 || c.config.moe_layers() > 0) return {Kind::rows_split};
  if (!c.codec.is_none()) return {Kind::one_chunk, Kind::two_chunks};
  return {Kind::rows_split, Kind::one_chunk, Kind::two_chunks};
}

PrefillCandidate make(const DecoderContext& c, Kind kind, int64_t rows,
                      const OverlapOptions& overlap) {
  switch (kind) {
    case Kind::rows_split:
      return {"rows split", Form::serial, std::make_unique<PrefillBlock>(c, rows, overlap)};
    case Kind::one_chunk:
      return {"one chunk", Form::serial, std::make_unique<ChunkedPrefill>(c, rows, 1)};
    case Kind::two_chunks:
      break;
  }
  return {"ISO", Form::overlapped, std::make_unique<ChunkedPrefill>(c, rows, 2)};
}

/// Whether uncompressed candidates are added to those with the context's codec.
bool keeps_plain(const DecoderContext& c, const OverlapOptions& overlap) {
  return overlap.allow_uncompressed && !c.codec.is_none() && c.tp.size() > 1;
}

/// Index of the fastest candidate, timed on dummy tokens whose cached keys are never read.
size_t fastest(const DecoderContext& c, int64_t rows,
               const std::vector<PrefillCandidate>& candidates, Bits bits) {
  const ModelConfig& m = c.config;
  const std::vector<int32_t> tokens(size_t(std::min(rows, m.max_seq)), 0);
  const Activation last(DType::f32, 1, m.hidden);
  std::vector<std::string> names;
  for (const PrefillCandidate& each : candidates) names.push_back(each.name);
  const std::string shape = fmt::format(
      "rows {} hidden {} layers {} heads {} kv_heads {} head_dim {} ffn {} block {} {} codec {}",
      rows, m.hidden, m.layers, m.heads, m.kv_heads, m.head_dim, m.ffn, m.parallel_block,
      name_of(c.dtype), c.codec.describe());
  const auto seconds = [&](size_t i) {
    return timed(c.tp, [&] { candidates[i].prefill->run(tokens, 0, last); })();
  };
  return tune(c.tp, "prefill", shape, names, seconds, bits);
}

}  // namespace

PrefillForm parse_prefill_form(std::string_view text) {
  if (text == "automatic") return PrefillForm::automatic;
  if (text == "serial") return PrefillForm::serial;
  if (text == "iso") return PrefillForm::iso;
  throw InvalidArgument(fmt::format("prefill '{}': expected automatic, serial or iso", text));
}

std::vector<PrefillCandidate> prefill_candidates(const DecoderContext& c, int64_t rows,
                                                 const OverlapOptions& overlap) {
  std::vector<PrefillCandidate> all;
  const bool with_plain = keeps_plain(c, overlap);
  if (with_plain) {
    DecoderContext plain = c;
    plain.codec = {};
    for (const Kind kind : kinds_for(plain)) all.push_back(make(plain, kind, rows, overlap));
  }
  for (const Kind kind : kinds_for(c)) {
    all.push_back(make(c, kind, rows, overlap));
    if (with_plain) all.back().name += " as " + c.codec.describe();
  }
  return all;
}

PrefillCandidate make_prefill(const DecoderContext& c, int64_t rows, const OverlapOptions& overlap,
                              PrefillForm form) {
  const std::vector<Kind> kinds = kinds_for(c);
  if (form == PrefillForm::iso) {
    if (kinds.back() != Kind::two_chunks) {
      throw InvalidArgument(
          fmt::format("prefill 'iso' with {}: expected a dense model on two ranks or more",
                      c.tp.size() == 1 ? "one rank" : "experts"));
    }
    return make(c, Kind::two_chunks, rows, overlap);
  }
  const bool single = kinds.size() == 1 && !keeps_plain(c, overlap);
  if (form == PrefillForm::serial || single || rows < kMinRowsOfTwoChunks) {
    return make(c, kinds.front(), rows, overlap);
  }
  std::vector<PrefillCandidate> all = prefill_candidates(c, rows, overlap);
  return std::move(
      all[fastest(c, rows, all, keeps_plain(c, overlap) ? Bits::by_candidate : Bits::same)]);
}

}  // namespace tandem
