// Message of the error that a call throws.
#pragma once

#include <concepts>
#include <string>

#include "tandem/error.h"

namespace tandem {

/// Empty if `call` throws nothing; errors other than `Expected` pass.
template <typename Expected = Error, std::invocable Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.what();
  }
  return "";
}

}  // namespace tandem
