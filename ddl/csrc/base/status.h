// Results: a code that programs act on and a message that people read.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "ddl.h"

namespace ddl {

// The codes of the C interface, so that nothing has to be translated at the boundary.
using Code = ddl_result;

struct Status {
    Code code = DDL_SUCCESS;
    std::string message;  // what was asked, what was found, what to do; empty on success

    bool ok() const { return code == DDL_SUCCESS; }
};

// Thrown by all parts but the engine's calls. These return a Status: no exception crosses the engine's thread.
class Error : public std::runtime_error {
  public:
    Error(Code code, const std::string& message) : std::runtime_error(message), code_(code) {}
    Code code() const { return code_; }
    Status status() const { return {code_, what()}; }

  private:
    Code code_;
};

}  // namespace ddl
