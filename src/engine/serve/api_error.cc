#include "engine/serve/api_error.h"

#include <nlohmann/json.hpp>

namespace tandem {

namespace {
using Json = nlohmann::ordered_json;
}  // namespace

std::string ApiError::json() const {
  const char* type = status == 429   ? "rate_limit_error"
                     : status == 401 ? "authentication_error"
                     : status >= 500 ? "server_error"
                                     : "invalid_request_error";
  Json error{{"message", what()}, {"type", type}, {"param", nullptr}, {"code", nullptr}};
  if (!param.empty()) error["param"] = param;
  if (!code.empty()) error["code"] = code;
  return Json{{"error", error}}.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace tandem
