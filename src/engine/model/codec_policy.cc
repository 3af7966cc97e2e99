#include "engine/model/codec_policy.h"

#include <fmt/format.h>

#include <set>

#include "overlap/attention/shape.h"
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
                           {"experts", &CodecPolicy::experts},
                           {"embeddings", &CodecPolicy::embeddings},
                           {"gradients", &CodecPolicy::gradients},
                           {"weights", &CodecPolicy::weights},
                           {"stages", &CodecPolicy::stages},
                           {"keys", &CodecPolicy::keys}};

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
    const std::string_view entry = text.substr(0, end);
    text = end == text.npos ? std::string_view{} : text.substr(end + 1);
    const std::string_view site = entry.substr(0, entry.find('='));
    Wire* wire = site_named(site, policy);
    if (!wire || !seen.insert(wire).second || entry.size() == site.size()) {
      throw InvalidArgument(
          fmt::format("codec '{}': expected attention=CODEC, mlp=CODEC, experts=CODEC and "
                      "embeddings=CODEC, of training also gradients=CODEC, weights=CODEC, "
                      "stages=CODEC and keys=CODEC, each at most once",
                      entry));
    }
    *wire = Wire::parse(entry.substr(site.size() + 1));
  }
  return policy;
}

std::string CodecPolicy::describe() const {
  std::string text;
  const auto add = [&](std::string_view site, const Wire& wire) {
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", site, wire.describe());
  };
  const CodecPolicy sums{attention, mlp};
  if (attention == mlp && *this == sums) return attention.describe();
  if (attention != mlp || !mlp.is_none()) add("attention", attention), add("mlp", mlp);
  for (const Site& site : kSites) {
    const Wire& wire = this->*site.wire;
    if (sums.*site.wire == wire) continue;
    add(site.name, wire);
  }
  return text;
}

void CodecPolicy::require_used(const ModelConfig& config, int tp, int dp, int ep, int pp,
                               int cp) const {
  const auto refuse = [&](std::string_view problem) {
    throw InvalidArgument(fmt::format("codec '{}': {}", describe(), problem));
  };
  if (dp <= 1 && (!gradients.is_none() || !weights.is_none())) {
    refuse(
        dp == 1
            ? "one data-parallel rank, which sends no gradients and no weights: expected --dp of "
              "2 or more, or none for these"
            : "gradients and weights are of training: expected attention=CODEC, mlp=CODEC, "
              "experts=CODEC and embeddings=CODEC");
  }
  if (!stages.is_none() && pp == 1) {
    refuse(dp == 0 ? "stages are of training: expected attention=CODEC, mlp=CODEC, experts=CODEC "
                     "and embeddings=CODEC"
                   : "one pipeline stage, which sends nothing: expected --pp of 2 or more, or none "
                     "for these");
  }
  if (!keys.is_none() && cp == 1) {
    refuse(dp == 0 ? "keys are of training: expected attention=CODEC, mlp=CODEC, experts=CODEC "
                     "and embeddings=CODEC"
                   : "one context-parallel rank, which sends no keys: expected --cp of 2 or more, "
                     "or none for these");
  }
  if (const std::string expected = find_wire_conflict(keys, config.head_dim); !expected.empty()) {
    refuse(fmt::format("keys={}: expected {}", keys.describe(), expected));
  }
  if (!experts.is_none() && config.moe_layers() == 0) {
    refuse("the model has no experts: expected none for these");
  }
  if (!experts.is_none() && tp * ep == 1) {
    refuse(
        "one rank has all experts, and sends it no rows: expected --tp or --ep of 2 or more, or "
        "none for these");
  }
  if (attention.is_none() && mlp.is_none() && embeddings.is_none()) return;
  if (tp == 1) {
    refuse("one tensor-parallel rank, which sends nothing: expected --tp of 2 or more, or none");
  }
  if (config.parallel_block && attention != mlp) {
    refuse("a parallel block has one sum for attention and MLP: expected one codec for both");
  }
  const bool has_mlp = config.moe_layers() < config.layers || config.shared_ffn > 0;
  if (attention.is_none() && !mlp.is_none() && !has_mlp) {
    refuse("the model's MLPs are experts: expected experts=CODEC, or one for attention");
  }
}

}  // namespace tandem
