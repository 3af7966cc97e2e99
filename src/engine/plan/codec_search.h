// The cheapest wire format of every site of a model for a budget: the rise of its loss on text.
//
// Every format is measured alone at every site. From all sites plain, the change that saves the
// most bytes per rise is made, as long as the rises of all sites together stay within what is
// allowed; then the combination is measured, and where that rises by more than the budget, less is
// allowed, until one holds. A fall of the loss by a format that loses bits is chance, and counts as
// a rise of that size until the combination is measured.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/model/codec_policy.h"
#include "engine/model/config.h"

namespace tandem {

/// Rows of a model that share a format.
struct CodecSite {
  /// Of the policy, or "block": of a parallel block, one sum for attention and MLP.
  std::string name;
  std::vector<Wire CodecPolicy::*> wires;
  int64_t rows = 0;  ///< of a token, through all layers
};
/// Those that send something between tensor-parallel ranks in the forward pass.
std::vector<CodecSite> codec_sites(const ModelConfig& config);
std::vector<std::string> site_names(const ModelConfig& config);
/// `wire` at the sites named. Throws InvalidArgument for one that the model does not have.
CodecPolicy codec_at(const ModelConfig& config, std::span<const std::string> sites,
                     const Wire& wire);

/// A budget as "0.5%": 0.005. Throws InvalidArgument for what is below 0 or no percentage.
double parse_budget(std::string_view text);

/// What one rank sends for a token in evaluation: the rows of all sites, of f32 or bf16 elements,
/// without routing. Of `lossless` as long as no exponent escapes.
struct SentBytes {
  ModelConfig model;
  int ranks = 2;
  DType dtype = DType::f32;

  double of(const CodecSite& site, const Wire& wire) const;
  double of(const CodecPolicy& policy) const;
};

/// One measurement.
struct CodecTrial {
  CodecPolicy policy;
  std::string site;  ///< that alone has a format; empty: several, or none
  double bits_per_byte = 0;
  double rise = 0;   ///< over no codec; 0.01 is 1 %
  double bytes = 0;  ///< sent, by SentBytes
};

struct CodecChoice {
  double budget = 0;
  std::vector<CodecTrial> trials;  ///< in their order, the first without a codec
  size_t chosen = 0;               ///< of `trials`
  const CodecTrial& best() const { return trials[chosen]; }
  const CodecTrial& plain() const { return trials.front(); }
};

/// Collective where `bits_per_byte`, of the text under a policy, is: the same on all ranks, which
/// then choose the same. `formats` are candidates of every site; with a budget of 0 only those that
/// are exact.
CodecChoice search_codecs(const SentBytes& sent, std::span<const Wire> formats, double budget,
                          const std::function<double(const CodecPolicy&)>& bits_per_byte);

}  // namespace tandem
