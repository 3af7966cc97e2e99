#include "engine/serve/request_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

// Bounds of fields that each of a request's texts has a copy of.
constexpr size_t kMaxStops = 16, kMaxStopBytes = 1024, kMaxBiases = 1024, kMaxTokens = 256;

/// "5" as 5; negative unless it is a whole number.
int32_t parse_token(const std::string& name) {
  int32_t token = 0;
  const char* const end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data(), end, token);
  return error == std::errc() && rest == end ? token : -1;
}

}  // namespace

bool is_token(const Json& value) {
  return value.is_number_integer() && value >= 0 && value <= std::numeric_limits<int32_t>::max();
}

std::string read_field(const Json& value, uint64_t& to) {
  int64_t number = 0;
  std::string expected = read_field(value, number);
  if (expected.empty()) to = uint64_t(number);
  return expected;
}

std::string read_field(const Json& value, std::vector<std::string>& to) {
  const auto is_stop = [](const Json& each) {
    return each.is_string() && each.get_ref<const std::string&>().size() <= kMaxStopBytes;
  };
  const Json list = value.is_string() ? Json::array({value}) : value;
  if (!list.is_array() || list.size() > kMaxStops || !std::ranges::all_of(list, is_stop)) {
    return fmt::format("a string or a list of up to {} strings, each of at most {} bytes",
                       kMaxStops, kMaxStopBytes);
  }
  to = list.get<std::vector<std::string>>();
  return {};
}

std::string read_field(const Json& value, std::vector<int32_t>& to) {
  if (!value.is_array() || value.size() > kMaxTokens || !std::ranges::all_of(value, is_token)) {
    return fmt::format("a list of up to {} tokens", kMaxTokens);
  }
  to = value.get<std::vector<int32_t>>();
  return {};
}

std::string read_field(const Json& value, std::vector<TokenBias>& to) {
  const std::string expected =
      fmt::format("an object of at most {} tokens' numbers and biases", kMaxBiases);
  if (!value.is_object() || value.size() > kMaxBiases) return expected;
  std::vector<TokenBias> biases;
  for (const auto& [name, bias] : value.items()) {
    const int32_t token = parse_token(name);
    if (token < 0 || !bias.is_number()) return expected;
    biases.push_back({token, bias.get<double>()});
  }
  to = std::move(biases);
  return {};
}

std::vector<std::string> client_fields() {
  std::vector<std::string> names;
  Request request;
  visit(request, [&](const char* name, auto&, SetBy by) {
    if (by == SetBy::client) names.push_back(name);
  });
  return names;
}

bool is_client_field(std::string_view name) {
  static const std::vector<std::string> names = client_fields();
  return std::ranges::find(names, name) != names.end();
}

}  // namespace tandem
