#include "model/codec_policy.h"

#include <fmt/format.h>

#include <set>

#include "tandem/error.h"

namespace tandem {
namespace {

struct Site {
  std::string_view name;
  Wire CodecPolicy::*wire;
};
constexpr Site kSites[] = {{"attention", &CodecPolicy::attention},
                           {"attn", &CodecPolicy::attention},
                           {"mlp", &CodecPolicy::mlp},
                           {"gradients", &CodecPolicy::gradients},
                           {"weights", &CodecPolicy::weights}};

Wire* site_named(std::string_view name, CodecPolicy& policy) {
  for (const Site& site : kSites) {
    if (site.name == name) return &(policy.*site.wire);
  }
  return nullptr;
}

}  // namespace

CodecPolicy CodecPolicy::parse(std::string_view text) {
  CodecPolicy policy;
  if (text.find('=') == text.npos) {
    policy.attention = policy.mlp = Wire::parse(text);
    return policy;
  }
  std::set<const Wire*> seen;
  while (!text.empty()) {
    const size_t end = text.find(',');
    const std::string_view part = text.substr(0, end);
    text = end == text.npos ? std::string_view{} : text.substr(end + 1);
    const std::string_view site = part.substr(0, part.find('='));
    Wire* wire = site_named(site, policy);
    if (!wire || !seen.insert(wire).second || part.size() == site.size()) {
      throw InvalidArgument(
          fmt::format("codec '{}': expected attention=CODEC and mlp=CODEC, of training also "
                      "gradients=CODEC and weights=CODEC, each at most once",
                      part));
    }
    *wire = Wire::parse(part.substr(site.size() + 1));
  }
  return policy;
}

std::string CodecPolicy::describe() const {
  std::string text;
  const auto add = [&](std::string_view site, const Wire& wire) {
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", site, wire.describe());
  };
  const bool is_trained = !gradients.is_none() || !weights.is_none();
  if (attention == mlp && !is_trained) return attention.describe();
  if (attention != mlp || !mlp.is_none()) add("attention", attention), add("mlp", mlp);
  if (!gradients.is_none()) add("gradients", gradients);
  if (!weights.is_none()) add("weights", weights);
  return text;
}

void CodecPolicy::require_used(const ModelConfig& config, int tp, int dp) const {
  const auto refuse = [&](std::string_view problem) {
    throw InvalidArgument(fmt::format("codec '{}': {}", describe(), problem));
  };
  if (dp <= 1 && (!gradients.is_none() || !weights.is_none())) {
    refuse(
        dp == 1
            ? "one data-parallel rank, which sends no gradients and no weights: expected --dp of "
              "2 or more, or none for these"
            : "gradients and weights are of training: expected attention=CODEC and mlp=CODEC");
  }
  if (attention.is_none() && mlp.is_none()) return;
  if (tp == 1) {
    refuse("one tensor-parallel rank, which sends nothing: expected --tp of 2 or more, or none");
  }
  if (config.parallel_block && attention != mlp) {
    refuse("a parallel block has one sum for attention and MLP: expected one codec for both");
  }
  const bool has_mlp = config.moe_layers() < config.layers || config.shared_ffn > 0;
  if (attention.is_none() && !has_mlp) {
    refuse("the model's MLPs are experts, whose sums stay plain: expected one for attention");
  }
}

}  // namespace tandem
