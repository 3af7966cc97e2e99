// Fields of a request that clients and files of prompts set in JSON, by the list in
// engine/infer/request.h.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "engine/infer/request.h"
#include "engine/model/config_value.h"

namespace tandem {

/// Sets `to` to a field's value. Returns what was expected instead, or nothing.
template <typename T>
std::string read_field(const nlohmann::ordered_json& value, T& to) {
  std::string expected(expected_type<T>(value));
  if (expected.empty()) to = value.get<T>();
  return expected;
}
/// An integer; seeds are modulo 2^64.
std::string read_field(const nlohmann::ordered_json& value, uint64_t& to);
/// A string or a list of strings.
std::string read_field(const nlohmann::ordered_json& value, std::vector<std::string>& to);
/// A list of tokens.
std::string read_field(const nlohmann::ordered_json& value, std::vector<int32_t>& to);
/// {"token": bias, …}.
std::string read_field(const nlohmann::ordered_json& value, std::vector<TokenBias>& to);

/// Whether a token's number may be `value`.
bool is_token(const nlohmann::ordered_json& value);

bool is_client_field(std::string_view name);
/// Names of the fields that clients set.
std::vector<std::string> client_fields();

/// Sets those fields that `root` has and that are not null. Calls reject(name, value, expected) for
/// another type of value.
template <typename Reject>
void take_client_fields(const nlohmann::ordered_json& root, Request& request,
                        const Reject& reject) {
  visit(request, [&](const char* name, auto& to, SetBy by) {
    const auto found = root.find(name);
    if (by != SetBy::client || found == root.end() || found->is_null()) return;
    const std::string expected = read_field(*found, to);
    if (!expected.empty()) reject(name, *found, expected);
  });
}

}  // namespace tandem
