#include "model/codec_policy.h"

#include <fmt/format.h>

#include <set>

#include "tandem/error.h"

namespace tandem {
namespace {

Wire wire_of(std::string_view text) {
  const Wire wire = Wire::parse(text);
  if (wire.codec == Codec::lossless) {
    throw InvalidArgument(fmt::format(
        "codec '{}': sums of partial products take one whose messages have one size", text));
  }
  return wire;
}

}  // namespace

CodecPolicy CodecPolicy::parse(std::string_view text) {
  CodecPolicy policy;
  if (text.find('=') == text.npos) {
    policy.attention = policy.mlp = wire_of(text);
    return policy;
  }
  std::set<std::string_view> seen;
  while (!text.empty()) {
    const size_t end = text.find(',');
    const std::string_view part = text.substr(0, end);
    text = end == text.npos ? std::string_view{} : text.substr(end + 1);
    const std::string_view site = part.substr(0, part.find('='));
    if ((site != "attention" && site != "mlp") || !seen.insert(site).second ||
        part.size() == site.size()) {
      throw InvalidArgument(fmt::format(
          "codec '{}': expected attention=CODEC and mlp=CODEC, each at most once", part));
    }
    (site == "mlp" ? policy.mlp : policy.attention) = wire_of(part.substr(site.size() + 1));
  }
  return policy;
}

std::string CodecPolicy::describe() const {
  if (attention == mlp) return attention.describe();
  return fmt::format("attention={},mlp={}", attention.describe(), mlp.describe());
}

}  // namespace tandem
