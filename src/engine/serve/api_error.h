// Error of a request to an HTTP server, with its status.
#pragma once

#include <string>
#include <utility>

#include "tandem/error.h"

namespace tandem {

/// Request that is refused, with the status of HTTP. `param`: the field, `code`: a name for
/// programs; both may be empty.
class ApiError : public Error {
 public:
  ApiError(int status_, const std::string& message, std::string param_ = "", std::string code_ = "")
      : Error(message), status(status_), param(std::move(param_)), code(std::move(code_)) {}
  /// {"error": {"message", "type", "param", "code"}}
  std::string json() const;

  int status;
  std::string param, code;
};

}  // namespace tandem
