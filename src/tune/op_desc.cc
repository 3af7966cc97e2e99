#include "tune/op_desc.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace tandem {
namespace {

template <typename Wanted>
std::string text_of(const OpDesc& desc, const Wanted& wanted) {
  std::string text;
  visit_fields(desc, [&](const Field& field, const auto& value) {
    if (wanted(field)) text += fmt::format(fmt::runtime(field.text), value);
  });
  return text.substr(1);
}

}  // namespace

std::string describe(const OpDesc& desc) {
  return text_of(desc, [](const Field&) { return true; });
}

std::string agreement(const OpDesc& desc) {
  return text_of(desc, [](const Field& field) { return field.agreed; });
}

nlohmann::json to_json(const OpDesc& desc) {
  nlohmann::json json{{"op", desc.op}};
  visit_fields(desc, [&](const Field& field, const auto& value) { json[field.name] = value; });
  return json;
}

std::string current_key(std::string key) {
  constexpr std::string_view kBefore = " or plain", kNow = " or uncompressed";
  if (const size_t at = key.find(kBefore); at != key.npos) key.replace(at, kBefore.size(), kNow);
  for (const std::string_view before : {" bias kn", " bias", " kn"}) {
    const size_t at = key.find(fmt::format("{} keep", before));
    if (at == std::string::npos) continue;
    return key.replace(at, before.size() + 5, fmt::format(" keep{}", before));
  }
  return key;
}

}  // namespace tandem
