// Search for the cheapest wire format of every site of a model within a budget, the relative rise
// of its loss on text.
//
// Every format is measured separately at every site. Starting with all sites uncompressed, the
// change that saves the most bytes per rise is applied, while the summed rises of all sites stay
// within a limit; then the combination is measured, and if it exceeds the budget, the limit is
// reduced until one fits. A decrease of the loss by a lossy format is chance, and counts as a rise
// of that size until the combination is measured.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/model/codec_policy.h"
#include "engine/model/config.h"

namespace tandem {

/// Rows of a model that share a format.
struct CodecSite {
  /// Site of the policy, or "block": in a parallel block, one sum for attention and MLP.
  std::string name;
  std::vector<Wire CodecPolicy::*> wires;
  int64_t rows = 0;  ///< per token, through all layers
};
/// Sites that communicate between tensor-parallel ranks in the forward pass.
std::vector<CodecSite> codec_sites(const ModelConfig& config);
std::vector<std::string> site_names(const ModelConfig& config);
/// Policy with `wire` at the named sites. Throws InvalidArgument for a site that the model does not
/// have.
CodecPolicy codec_at(const ModelConfig& config, std::span<const std::string> sites,
                     const Wire& wire);

/// 0.005 for "0.5%"; nullopt for a negative value or without a percent sign.
std::optional<double> parse_percentage(std::string_view text);
constexpr std::string_view kPercentage = "a percentage of 0 or more, such as 0.5%";

/// Bytes sent by one rank per token in evaluation: the rows of all sites, of f32 or bf16 elements,
/// without routing metadata. For `lossless`, assumes that no exponent needs an escape.
struct SentBytes {
  ModelConfig model;
  int ranks = 2;
  DType dtype = DType::f32;

  double of(const CodecSite& site, const Wire& wire) const;
  double of(const CodecPolicy& policy) const;
};

/// Adds the fields that results on `bytes` of text end with: ranks, dtype, model, machine, commit,
/// command and date.
void add_origin(nlohmann::ordered_json& result, const SentBytes& sent, int64_t bytes);

/// One measurement.
struct CodecTrial {
  CodecPolicy policy;
  std::string site;  ///< the only site with a format; empty: several, or none
  double bits_per_byte = 0;
  double rise = 0;   ///< over no codec; 0.01 is 1 %
  double bytes = 0;  ///< sent, by SentBytes
};

struct CodecChoice {
  double budget = 0;
  std::vector<CodecTrial> trials;  ///< in order of measurement, the first without a codec
  size_t chosen = 0;               ///< index in `trials`
  const CodecTrial& best() const { return trials[chosen]; }
  const CodecTrial& uncompressed() const { return trials.front(); }
};

/// Collective if `bits_per_byte` is: it returns the loss of the text under a policy, the same on
/// all ranks, which then make the same choice. `formats` are candidates for every site; with a
/// budget of 0 only exact ones are used.
CodecChoice search_codecs(const SentBytes& sent, std::span<const Wire> formats, double budget,
                          const std::function<double(const CodecPolicy&)>& bits_per_byte);

}  // namespace tandem
