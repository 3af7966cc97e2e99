#include "tune/op_desc.h"

#include <fmt/format.h>

#include <cctype>
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

bool replace(std::string& text, std::string_view before, std::string_view now) {
  const size_t at = text.find(before);
  if (at == text.npos) return false;
  text.replace(at, before.size(), now);
  return true;
}

/// Name of a candidate that earlier versions measured for `key`.
std::string current_name(const std::string& key, std::string name) {
  const bool gemm = key.find(" ag_gemm ") != key.npos || key.find(" gemm_rs ") != key.npos;
  if (name == "plain") return gemm ? "serial_kernels" : "uncompressed";
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {" pieces", " chunks"},
      {"own tiles", "local tiles"},
      {"sorted beside", "overlapped_sort"},
      {"sort beside", "overlap the sort"},
      {"1 part", "1 column group"},
      {" parts", " column groups"},
      {" plain, back", " uncompressed, back"},
      {"back plain", "back uncompressed"}};
  for (const auto& [before, now] : kNames) replace(name, before, now);
  return name;
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
  replace(key, " or plain", " or uncompressed");
  for (const std::string_view before : {" bias kn", " bias", " kn"}) {
    const size_t at = key.find(fmt::format("{} keep", before));
    if (at == std::string::npos) continue;
    return key.replace(at, before.size() + 5, fmt::format(" keep{}", before));
  }
  return key;
}

std::pair<std::string, nlohmann::json> current_entry(std::string key, nlohmann::json entry) {
  key = current_key(std::move(key));
  const auto times = entry.find("measured_us");
  if (times == entry.end() || !times->is_object() || times->empty()) return {key, entry};
  // GEMM+RS: "adding" is `fused` today, and "fused", whose variants are named by their tile sizes,
  // `fused_cutlass`.
  const bool former_rs =
      key.find(" gemm_rs ") != key.npos && (times->contains("adding") || times->contains("plain"));
  if (!replace(key, " gemm_rs adding ", " gemm_rs fused ") &&
      std::isdigit(static_cast<unsigned char>(times->begin().key().front()))) {
    replace(key, " gemm_rs fused ", " gemm_rs fused_cutlass ");
  }
  nlohmann::json renamed = nlohmann::json::object();
  for (const auto& [name, us] : times->items()) {
    const std::string now = former_rs && name == "adding"  ? "fused"
                            : former_rs && name == "fused" ? "fused_cutlass"
                                                           : current_name(key, name);
    renamed[now] = us;
  }
  *times = std::move(renamed);
  return {key, entry};
}

}  // namespace tandem
