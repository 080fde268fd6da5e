//! The tests are in the folders and files beside this one. Cargo requires a library or a program in each package.
