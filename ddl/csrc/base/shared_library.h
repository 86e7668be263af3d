// Libraries that are looked for at run time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddl {

class SharedLibrary {
  public:
    enum class Scope : uint8_t { local, global };  // global: what it loads itself finds its symbols
    // The first of `names` that loads; it is never unloaded. Throws Error(DDL_ERROR_UNSUPPORTED) that names `what` it
    // is for, what was tried and `remedy`.
    SharedLibrary(const std::vector<std::string>& names, const std::string& what, const std::string& remedy,
                  Scope scope = Scope::local);

    // Throws Error(DDL_ERROR_UNSUPPORTED) where the library has no such function.
    template <typename Function>
    void find(const char* name, Function** function) const {
        *function = reinterpret_cast<Function*>(address_of(name));
    }

    const std::string& name() const { return name_; }

  private:
    void* address_of(const char* name) const;

    std::string name_;
    void* handle_ = nullptr;
};

// The file that an environment variable names; "" where it names none.
std::string chosen_library(const char* variable);

// The file of a library that this process has loaded, whose name begins with `prefix` ("libcudart.so"); "" where there
// is none.
std::string loaded_library(const std::string& prefix);

// A number that grows with each library that the process loads: where it has not changed, no other was.
unsigned long long loaded_count();

}  // namespace ddl
