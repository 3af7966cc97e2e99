#include "model/codec_policy.h"

#include <fmt/format.h>

#include <set>

#include "tandem/error.h"

namespace tandem {

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
    Wire* wire = site == "attention" || site == "attn" ? &policy.attention
                 : site == "mlp"                       ? &policy.mlp
                                                       : nullptr;
    if (!wire || !seen.insert(wire).second || part.size() == site.size()) {
      throw InvalidArgument(fmt::format(
          "codec '{}': expected attention=CODEC and mlp=CODEC, each at most once", part));
    }
    *wire = Wire::parse(part.substr(site.size() + 1));
  }
  return policy;
}

std::string CodecPolicy::describe() const {
  if (attention == mlp) return attention.describe();
  return fmt::format("attention={},mlp={}", attention.describe(), mlp.describe());
}

void CodecPolicy::require_used(const ModelConfig& config, int tp) const {
  if (is_none()) return;
  const auto refuse = [&](std::string_view problem) {
    throw InvalidArgument(fmt::format("codec '{}': {}", describe(), problem));
  };
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
