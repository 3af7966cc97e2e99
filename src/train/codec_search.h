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

#include "model/codec_policy.h"
#include "model/config.h"

namespace tandem {

/// Sums of a model that share a format.
struct CodecSite {
  std::string name;  ///< "attention", "mlp", or "block": of a parallel block, one sum for both
  std::vector<Wire CodecPolicy::*> wires;
  int64_t layers = 0;  ///< that have it
};
/// Those that have sums over tensor-parallel ranks: experts' are none.
std::vector<CodecSite> codec_sites(const ModelConfig& config);

/// A budget as "0.5%": 0.005. Throws InvalidArgument for what is below 0 or no percentage.
double parse_budget(std::string_view text);

/// What one rank sends for a token: the partial products of all sites, of f32 or bf16 elements,
/// each layer's a row. Of `lossless` as long as no exponent escapes.
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
